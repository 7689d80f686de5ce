"""Seconds of a server's forwards, from a profile or operator tables, behind one protocol."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Protocol

import numpy as np

from costmodel.architecture import ModelArchitecture
from costmodel.compose.serving_tables import Precision
from costmodel.device import device_by_name
from costmodel.errors import InputError
from costmodel.fit import Calibration
from costmodel.profile import Profile
from costmodel.stages import PlainSection

# Expected error of a profile that states none.
UNKNOWN_ERROR = 0.1
# Prompts from this length on tell what grows with their square.
_LONG_PROMPT = 1024
# Query rows of one head that one processor attends with at a time (FlashAttention's tiles).
_TILE_ROWS = 128


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """Seconds of one step, or of what prompts add to one, by kind of work."""

    products: float = 0.0
    attention: float = 0.0
    all_reduce: float = 0.0

    @property
    def total(self) -> float:
        """The sum of the three."""
        return self.products + self.attention + self.all_reduce


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One device: what a plan needs of it. `power_w`: its limit or TDP; None if not known."""

    name: str
    memory_bytes: float
    power_w: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where times come from: a profile's provenance, or `operators`.

    `error`: expected relative error of a forward; `whole_runtime`: measured with its host and
    its gaps, so that nothing is to be added for this project's own decoder.
    """

    kind: str
    text: str
    error: float
    whole_runtime: bool = False


class StepModel(Protocol):
    """Seconds of one target's steps on `tensor_parallel` devices of one kind."""

    @property
    def architecture(self) -> ModelArchitecture: ...
    @property
    def precision(self) -> Precision: ...
    @property
    def card(self) -> Card: ...
    @property
    def origin(self) -> Origin: ...
    @property
    def tensor_parallel(self) -> int: ...

    def decode(self, batch: float, context: float, rows: int = 1) -> StepSeconds:
        """`rows` new rows for each of `batch` sequences with `context` cached tokens each."""
        ...

    def prompt(self, tokens: float, batch: float, chunks: int) -> StepSeconds:
        """What a prompt adds to `chunks` steps that run `batch` rows anyway; 0: none."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ProfileForward:
    """Steps from a profile, shipped, measured or the user's own.

    Most profiles hold verifications at batch 1 and plain steps at many. A step of B sequences
    with r rows each is put together as the forward of r x B rows on (next to) no context, plus
    attention over the cache: that of B plain steps, more by as much as r rows take more than
    one at batch 1, and never more than B times one sequence's. Where verifications were
    measured at more batches, they are used as they are.
    """

    profile: Profile

    def __post_init__(self) -> None:
        if self.profile.runtime.element_bytes != 2 or self.profile.runtime.quantization:
            raise InputError(
                "plans need a profile in bfloat16 or float16"
                f" (it is in {self.profile.runtime.quantization or self.profile.runtime.dtype})"
            )

    @property
    def architecture(self) -> ModelArchitecture:
        """The target."""
        return self.profile.target.architecture

    @property
    def precision(self) -> Precision:
        """Two bytes a weight and a cached value."""
        return Precision()

    @property
    def tensor_parallel(self) -> int:
        """Devices that share the target."""
        return self.profile.runtime.tensor_parallel

    @property
    def card(self) -> Card:
        """The device; its power limit where the profile has one, else the data sheet's."""
        device = self.profile.device
        known = device_by_name(device.name)
        power_w = device.power_limit_w or (known.tdp_w if known else None)
        return Card(name=device.name, memory_bytes=device.memory_bytes, power_w=power_w)

    @property
    def origin(self) -> Origin:
        """The profile's provenance; the error is its held-out one, else its error bar."""
        made, held_out = self.profile.provenance, self.profile.held_out
        error = UNKNOWN_ERROR if made.error_bar is None else made.error_bar
        if held_out is not None:
            error = held_out.error.mape
        return Origin(
            kind=made.kind,
            text=made.source or f"{made.kind} {made.created_utc[:10]}",
            error=error,
            whole_runtime=self.profile.runtime.kind != "kernels",
        )

    def decode(self, batch: float, context: float, rows: int = 1) -> StepSeconds:
        """`rows` new rows for each of `batch` sequences with `context` cached tokens each."""
        if rows > 1:
            rows = self._bucket(rows)
        if batch > 1 and self._batches[-1] > 1 and batch <= self._batches[-1] and rows > 1:
            fixed = self._verify_s(rows, self._least_context, batch)
            return _split(fixed, self._verify_s(rows, context, batch))
        if rows == 1:
            plain = self._plain_s(batch, context)
            if plain is not None:
                return _split(self._plain_s(batch, self._least_context) or plain, plain)
        fixed = self._verify_s(rows * batch, self._least_context)
        if (least := self._plain_s(batch, self._least_context)) is not None:
            fixed = max(fixed, least)
        return StepSeconds(products=fixed, attention=self._attention_s(batch, context, rows))

    def prompt(self, tokens: float, batch: float, chunks: int) -> StepSeconds:
        """What a prompt adds to `chunks` steps that run `batch` rows anyway; 0: none."""
        part = tokens / chunks
        added = self._prompt_rows_s(part + batch) - (self._prompt_rows_s(batch) if batch else 0.0)
        return StepSeconds(
            products=chunks * max(added, 0.0), attention=self._prompt_square_s * tokens**2
        )

    @cached_property
    def _verify(self) -> Calibration:
        return self.profile.verify_calibration()

    @cached_property
    def _batches(self) -> list[int]:
        return sorted(set(self.profile.surface.batch)) if self.profile.surface else [1]

    @cached_property
    def _least_context(self) -> int:
        return min(self.profile.surface.context) if self.profile.surface else 1

    def _bucket(self, rows: int) -> int:
        return min((b for b in self.profile.runtime.buckets if b >= rows), default=rows)

    def _verify_s(self, rows: float, context: float, batch: float = 1) -> float:
        return float(self._verify.predict_s(rows, max(context, self._least_context), batch))

    def _plain_s(self, batch: float, context: float) -> float | None:
        """A plain step; None where it was not measured at more than the one batch asked for."""
        plain = self.profile.stages.plain
        if plain is None:
            return None
        batches = sorted(set(plain.batch))
        if batch > 1 and len(batches) == 1:
            return None
        low = max((b for b in batches if b <= batch), default=batches[0])
        if low == batches[-1] and len(batches) > 1 and batch > low:
            low = batches[-2]
        near = [low, min((b for b in batches if b > low), default=low)]
        times = [_known(plain, max(context, self._least_context), b) for b in near]
        if near[0] == near[1]:
            return times[0]
        slope = max(times[1] - times[0], 0.0) / (near[1] - near[0])
        return times[0] + slope * (batch - near[0])

    def _attention_s(self, batch: float, context: float, rows: int) -> float:
        one = self._cached_s(rows, context)
        all_rows = one * max(1.0, batch * self._busy_share(rows))
        plain, fixed = self._plain_s(batch, context), self._plain_s(batch, self._least_context)
        if plain is None or fixed is None:
            return all_rows
        one_row = self._cached_s(1, context)
        base = max(plain - fixed, 0.0)
        ratio = max(one / one_row, 1.0) if one_row > 0 else 1.0
        return max(base, min(all_rows, base * ratio))

    def _busy_share(self, rows: int) -> float:
        """Share of the processors that one sequence's attention keeps busy; 1 if not known."""
        known = device_by_name(self.profile.device.name)
        if known is None:
            return 1.0
        tiles = self.architecture.heads / self.tensor_parallel * np.ceil(rows / _TILE_ROWS)
        return float(min(tiles / known.sm_count, 1.0))

    def _cached_s(self, rows: int, context: float) -> float:
        """What cached tokens add to a verification at batch 1."""
        added = self._verify_s(rows, context) - self._verify_s(rows, self._least_context)
        return max(added, 0.0)

    def _prompt_rows_s(self, rows: float) -> float:
        """A prompt's forward without what grows with the square of its length."""
        prefill = self.profile.stages.prefill
        if prefill is None:
            return self._verify_s(max(rows, 1.0), self._least_context)
        return float(prefill.seconds(rows)) - self._prompt_square_s * rows**2

    @cached_property
    def _prompt_square_s(self) -> float:
        """Seconds per squared token: attention of a prompt, from long ones' times."""
        prefill = self.profile.stages.prefill
        if prefill is None:
            return 0.0
        tokens, seconds = np.array(prefill.tokens, float), np.array(prefill.median_s)
        long = tokens >= _LONG_PROMPT
        if np.count_nonzero(long) < 3:
            return 0.0
        weight = 1 / seconds[long]
        powers = np.vander(tokens[long], 3)
        found = np.linalg.lstsq(powers * weight[:, None], np.ones(len(weight)), rcond=None)[0]
        return max(float(found[0]), 0.0)


def _split(fixed: float, total: float) -> StepSeconds:
    return StepSeconds(products=min(fixed, total), attention=max(total - fixed, 0.0))


def _known(plain: PlainSection, context: float, batch: int) -> float:
    seconds = plain.seconds(context, batch)
    if seconds is None:
        raise InputError(f"no plain step of batch {batch} was measured")
    return seconds
