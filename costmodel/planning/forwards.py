"""Seconds of a target's forwards on its devices, from a profile."""

from __future__ import annotations

import dataclasses
import math
from functools import cache, cached_property
from typing import Any

import numpy as np

from costmodel.architecture import ModelArchitecture
from costmodel.calibration.points import Calibration
from costmodel.catalog import all_reduce_s, device_by_name, protocols_of
from costmodel.compose.operators import CHUNK_ROWS
from costmodel.compose.transfer import UNKNOWN_ERROR, transfer_errors
from costmodel.errors import InputError
from costmodel.io import read_yaml, shipped_directory
from costmodel.planning.engines import ValueBytes
from costmodel.profile.profile import Profile
from costmodel.statistics import extend_linear
from costmodel.weights import layer_bytes, weights_label

# Share of a data sheet's memory that a driver leaves: 23.5 of 24 GiB of an RTX 4090, 79.1 of 80 of
# an H100. A measured profile has what its driver reported.
_VISIBLE = 0.98
# Shortest prompt that the squared term of attention is fitted to.
_LONG_PROMPT = 1024
# Bytes of one logit when it is sampled from. The generation settings of gpt-oss (the models with
# sinks) name no top-p, so that nothing is sorted: 0.6 of the time (lab/studies/served_rows.py).
_LOGIT_BYTES, _UNSORTED_SHARE = 4, 0.6
_CHIPS: dict[str, Any] = read_yaml(shipped_directory() / "chips.yaml")
POWER_SHARE, POWER_EXPONENT = _CHIPS["power"]["share"], _CHIPS["power"]["exponent"]
# Query rows of one head that one processor attends with at a time (FlashAttention's tiles).
_TILE_ROWS = 128
_UNSPLIT: dict[str, Any] = _CHIPS["unsplit"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ForwardSeconds:
    """Seconds of one forward, or of the prompts added to it, by kind of work."""

    products: float = 0.0
    attention: float = 0.0
    all_reduce: float = 0.0

    @property
    def total(self) -> float:
        return self.products + self.attention + self.all_reduce

    def scaled(self, factor: float) -> ForwardSeconds:
        parts = dataclasses.asdict(self)
        return ForwardSeconds(**{name: factor * seconds for name, seconds in parts.items()})

    def __add__(self, other: ForwardSeconds) -> ForwardSeconds:
        return ForwardSeconds(
            products=self.products + other.products,
            attention=self.attention + other.attention,
            all_reduce=self.all_reduce + other.all_reduce,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Source of the times: a profile's provenance.

    `error` is the expected relative error of a forward. With `whole_runtime` the times hold host
    work and gaps between kernels, so nothing is added to them for the `engine` that they were
    measured in, except `host_s`: seconds of a step on its host that were measured apart. `experts`
    is that of the profile's provenance.
    """

    kind: str
    text: str
    error: float
    whole_runtime: bool = False
    engine: str = "rooftree"
    host_s: float = 0.0
    experts: str = ""


class TargetForward:
    """Forwards of a profile's target on `tensor_parallel` equal devices, served by `engine`.

    Most profiles hold verifications at batch 1 and plain steps at many batches. A forward of B
    sequences with r rows each is the forward of r x B rows over the shortest context, plus the
    attention of B plain steps, scaled by the ratio of r rows to one row at batch 1, and at most B
    times that of one sequence. Where the engine splits no keys of several rows, their attention
    takes at least one walk over all keys. `ranks` data-parallel groups share the experts, and step
    together.
    """

    def __init__(self, profile: Profile, engine: str = "vllm", ranks: int = 1) -> None:
        runtime, surface = profile.runtime, profile.surface
        size = float(runtime.element_bytes)
        self.profile, self.engine = profile, engine
        self.architecture: ModelArchitecture = profile.target.architecture
        self.tensor_parallel: int = runtime.tensor_parallel
        self.ranks = ranks
        self.value_bytes = ValueBytes(
            weight=_weight_bytes(profile), embedding=profile.roofline().read_bytes[1],
            cached=runtime.cache_bytes or size, other=size,
        )  # fmt: skip
        self._device = device_by_name(profile.device.name)
        self.device = profile.device
        if (spec := self._device) is not None:  # what is not measured is of the data sheet
            update = {"power_limit_w": self.device.power_limit_w or spec.tdp_w}
            if profile.provenance.borrowed:
                update["memory_bytes"] = int(_VISIBLE * self.device.memory_bytes)
            self.device = self.device.model_copy(update=update)
        # Its held-out error counts, else its error bar.
        made, held_out, timed = profile.provenance, profile.held_out, runtime.engine
        error = UNKNOWN_ERROR if made.error_bar is None else made.error_bar
        self.origin = Origin(
            kind=made.kind,
            text=made.source or f"{made.kind} {made.created_utc[:10]}",
            error=error if held_out is None else held_out.error.mape,
            whole_runtime=runtime.kind != "kernels",
            engine="vllm" if runtime.kind == "vllm" else "rooftree",
            host_s=(timed.host_s or 0.0) if timed else 0.0,
            experts=made.experts,
        )
        # The engine walks over all keys with several rows, which times not measured in it lack.
        apart = engine == "vllm" and runtime.kind != "vllm" and not runtime.cache_bytes
        chips, slug = transfer_errors().chips, "" if spec is None else spec.slug
        self._generation, self._chip = chips.get(slug, ("", ""))
        self.unsplit = apart and self._chip in _UNSPLIT["chips"]
        # Whether the engine's attention is planned on the host in every step.
        self.plans_on_host = self._chip in _CHIPS["host_planned"]
        # Of messages that go over PCIe the all-reduces are published for the best case.
        shared = self.tensor_parallel * ranks > 1
        self.shares_pcie = shared and self._chip in _CHIPS["pcie"]
        errors = _CHIPS["power"]["errors"]
        self.power_error: float = errors["host_planned" if self.plans_on_host else "others"]
        self._protocols = protocols_of(profile.device.slug, runtime.tensor_parallel)
        self._most_batch = max(surface.batch) if surface else 1
        self._least_context = min(surface.context) if surface else 1
        self._most_rows = max(surface.rows) if surface else 0
        # A plan asks for the same steps again and again.
        self.decode = cache(self._step)
        self._plain_once_s = cache(self._plain_s)
        self._verify_once_s = cache(self._verify_s)

    @property
    def most_tree_rows(self) -> int | None:
        """Rows of a tree up to which there are times; None: of any tree.

        Composed times of recurrent layers are those of a chain beyond a tile of their kernel.
        """
        composed = self.profile.runtime.kind == "kernels" and self.architecture.recurrent
        return CHUNK_ROWS if composed else None

    def logits_s(self, rows: float) -> float:
        """Seconds to read the logits of so many rows once; 0 on a device that is not known."""
        if self._device is None:
            return 0.0
        share = _UNSORTED_SHARE if self.architecture.sinks else 1.0
        read_bytes = share * _LOGIT_BYTES * self.architecture.vocab * rows
        return read_bytes / self._device.peak_bytes_per_s

    def power_share(self, rows_per_s: float) -> float:
        """Mean power over its limit of each device that computes so many rows a second.

        Power grows with a small power of the share of the peak rate that the products take; 1 on
        a device that is not known.
        """
        if self._device is None:
            return 1.0
        flops_per_s = 2 * self.architecture.active_parameters * rows_per_s / self.tensor_parallel
        share = flops_per_s / self._device.peak_flops_per_s
        return float(min(POWER_SHARE * share**POWER_EXPONENT, 1.0))

    def _step(self, batch: float, context: float, rows: int = 1) -> ForwardSeconds:
        """Seconds of `rows` rows for each of `batch` sequences with `context` cached tokens.

        The part of all-reduces is estimated from published ones; without any it is in the products.
        """
        padded = min((b for b in self.profile.runtime.buckets if b >= rows > 1), default=rows)
        whole = self._decode(batch, context, padded)
        if self.unsplit and rows > 1:
            walk_s = self._walk_s(batch, context, rows)
            whole = dataclasses.replace(whole, attention=max(whole.attention, walk_s))
        if not self._protocols:
            return whole
        a = self.architecture
        message_bytes = self.profile.runtime.element_bytes * batch * rows * a.hidden
        one_s = float(all_reduce_s(self._protocols, message_bytes))
        reduced_s = min(2 * a.layers * one_s, whole.products)
        return dataclasses.replace(whole, products=whole.products - reduced_s, all_reduce=reduced_s)

    def prompt(self, tokens: float, rows: float, chunks: int, cached: float = 0) -> ForwardSeconds:
        """Seconds that a prompt adds to `chunks` forwards of `rows` other rows (0: none).

        It is of `tokens` behind `cached` ones, which they attend to.
        """
        part = tokens / chunks
        added = self._prompt_rows_s(part + rows) - (self._prompt_rows_s(rows) if rows else 0.0)
        return ForwardSeconds(
            products=chunks * max(added, 0.0),
            attention=self.prompt_attention_s(tokens, tokens / 2 + cached),
        )

    def prompt_attention_s(self, tokens: float, keys: float) -> float:
        """Seconds of a prompt's attention whose tokens attend to so many keys on average."""
        return 2 * self._prompt_square_s * tokens * keys

    def _decode(self, batch: float, context: float, rows: int) -> ForwardSeconds:
        """Seconds of a whole bucket of rows, all-reduces among the products."""
        least = self._least_context
        if 1 < batch <= self._most_batch and rows > 1:
            ends = (self._verify_once_s(rows, tokens, batch) for tokens in (least, context))
            return _split(*ends)
        plain, plain_least = self._plain_once_s(batch, context), self._plain_once_s(batch, least)
        if rows == 1 and plain is not None:
            return _split(plain_least or plain, plain)
        products = self._verify_once_s(rows * batch, least)
        if self.architecture.recurrent and plain_least is not None:
            # What as many rows of one sequence do not pay: the states of the others.
            products += max(plain_least - self._verify_once_s(batch, least), 0.0)
        products = max(products, plain_least or 0.0)
        one = self._cached_s(rows, context)
        busy = 1.0  # share of the processors that one sequence's attention keeps busy, if known
        if self._device is not None:
            tiles = self.architecture.heads / self.tensor_parallel * np.ceil(rows / _TILE_ROWS)
            busy = float(min(tiles / self._device.sm_count, 1.0))
        attention = one * max(1.0, batch * busy)
        if plain is not None and plain_least is not None:
            base, one_row = max(plain - plain_least, 0.0), self._cached_s(1, context)
            ratio = max(one / one_row, 1.0) if one_row > 0 else 1.0
            attention = max(base, min(attention, base * ratio))
        return ForwardSeconds(products=products, attention=attention)

    @cached_property
    def _verify(self) -> Calibration:
        return self.profile.verify_calibration()

    def _verify_s(self, rows: float, context: float, batch: float = 1) -> float:
        """Seconds of a verification; none takes longer than one of more rows, its padded form."""
        padded = np.append(rows, np.arange(math.ceil(rows) + 1, self._most_rows + 1))
        seconds = self._verify.predict_s(padded, max(context, self._least_context), batch)
        return float(np.min(seconds))

    def _plain_s(self, batch: float, context: float) -> float | None:
        """Seconds of a plain step, linear between batches; None beyond a single batch of 1.

        No batch takes longer than a larger one that was measured over as much context, to which it
        can be padded; nor is one shorter than a smaller one.
        """
        plain, context = self.profile.stages.plain, max(context, self._least_context)
        batches = [] if plain is None else sorted(set(plain.batch))
        if plain is None or (batch > 1 and len(batches) == 1):
            return None
        measured = np.array([plain.seconds(context, one) for one in batches], dtype=np.float64)
        longest = dict(sorted(zip(plain.batch, plain.context, strict=True)))
        covered = np.array([longest[one] >= context for one in batches])
        padded = np.minimum.accumulate(np.where(covered, measured, np.inf)[::-1])[::-1]
        steps = np.maximum.accumulate(np.minimum(measured, padded))
        return float(extend_linear(batches, steps, batch))

    def _cached_s(self, rows: int, context: float) -> float:
        added = self._verify_once_s(rows, context) - self._verify_once_s(rows, self._least_context)
        return max(added, 0.0)

    def _walk_s(self, batch: float, context: float, rows: int) -> float:
        """Seconds of all layers' walks over cached tokens whose keys are not split."""
        a, device = self.architecture, self._device
        if device is None:
            return 0.0
        share = _UNSPLIT["shares"]["Ampere" if "Ampere" in self._generation else "others"]
        processor_flops_per_s = device.peak_flops_per_s / device.sm_count
        tile_key_flops = 4 * _UNSPLIT["rows"] * a.head_dim  # scores and values, product and sum
        tiles = batch * a.heads / self.tensor_parallel * np.ceil(rows / _UNSPLIT["rows"])
        waves = float(np.ceil(tiles / device.sm_count))
        seen = min(context, a.sliding_window or context)
        full = a.attention_layers if a.sliding_window is None else a.full_layers
        tokens = full * a.full_score_ratio * context + (a.attention_layers - full) * seen
        return float(tile_key_flops / processor_flops_per_s / share * waves * tokens)

    def _prompt_rows_s(self, rows: float) -> float:
        """Seconds of a prompt's forward, without the part that grows with its squared length."""
        prefill = self.profile.stages.prefill
        if prefill is None:
            return self._verify_once_s(max(rows, 1.0), self._least_context)
        return float(prefill.seconds(rows)) - self._prompt_square_s * rows**2

    @cached_property
    def _prompt_square_s(self) -> float:
        """Seconds of a prompt's attention per squared token, fitted to long prompts."""
        prefill = self.profile.stages.prefill
        tokens = np.array(prefill.tokens if prefill else (), float)
        long = tokens >= _LONG_PROMPT
        if prefill is None or np.count_nonzero(long) < 3:
            return 0.0
        weight = 1 / np.array(prefill.median_s)[long]
        powers = np.vander(tokens[long], 3)
        fitted = np.linalg.lstsq(powers * weight[:, None], np.ones(len(weight)), rcond=None)[0]
        return max(float(fitted[0]), 0.0)


def _weight_bytes(profile: Profile) -> float:
    """Bytes of a weight: those measured, else what the label of quantised weights means.

    Raises InputError for a label that does not say.
    """
    runtime = profile.runtime
    label = weights_label(runtime.quantization)
    if runtime.weight_bytes or label is None:
        return runtime.weight_bytes or float(runtime.element_bytes)
    held = layer_bytes(profile.target.architecture, label)
    if held is None:
        raise InputError(
            f"the profile is of weights '{label}', and their bytes in memory are not known",
            hint="Write the bytes of one weight into it, as weight_bytes under runtime",
        )
    return held


def _split(fixed: float, total: float) -> ForwardSeconds:
    return ForwardSeconds(products=min(fixed, total), attention=max(total - fixed, 0.0))
