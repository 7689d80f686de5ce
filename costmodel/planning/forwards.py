"""Kernel seconds of a target's forwards on its devices, from a profile or operator tables."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Protocol

import numpy as np

from costmodel.architecture import ModelArchitecture
from costmodel.calibration.base import Calibration
from costmodel.catalog import DeviceSpec, device_by_name
from costmodel.communication import LinkProtocol, all_reduce_s
from costmodel.compose.operators import prompt_attention_s
from costmodel.compose.serving_tables import ServingTables
from costmodel.compose.unsplit import unsplit_attention_s
from costmodel.errors import InputError
from costmodel.planning.engines import ValueBytes
from costmodel.profile.profile import Profile
from costmodel.profile.schema import PlainSection

# Expected error of a profile that states none.
UNKNOWN_ERROR = 0.1
# Shortest prompt that the squared term of attention is fitted to.
_LONG_PROMPT = 1024
# Query rows of one head that one processor attends with at a time (FlashAttention's tiles).
_TILE_ROWS = 128


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ForwardSeconds:
    """Seconds of one forward, or of the prompts added to it, by kind of work."""

    products: float = 0.0
    attention: float = 0.0
    all_reduce: float = 0.0

    @property
    def total(self) -> float:
        """The sum of the three."""
        return self.products + self.attention + self.all_reduce


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimits:
    """Memory and power of one device; `power_w` is its power limit or TDP, None if not known."""

    name: str
    memory_bytes: float
    power_w: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Source of the times: a profile's provenance, or `operators`.

    `error` is the expected relative error of a forward. With `whole_runtime` the times hold host
    work and gaps between kernels, so nothing is added to them for the `engine` that they were
    measured in, except `host_s`: seconds of a step on its host that were measured apart.
    """

    kind: str
    text: str
    error: float
    whole_runtime: bool = False
    engine: str = "rooftree"
    host_s: float = 0.0


class TargetForward(Protocol):
    """Kernel seconds of one target's forwards on `tensor_parallel` equal devices."""

    @property
    def architecture(self) -> ModelArchitecture: ...
    @property
    def value_bytes(self) -> ValueBytes: ...
    @property
    def device(self) -> DeviceLimits: ...
    @property
    def origin(self) -> Origin: ...
    @property
    def tensor_parallel(self) -> int: ...

    def decode(self, batch: float, context: float, rows: int = 1) -> ForwardSeconds:
        """Seconds of `rows` rows for each of `batch` sequences with `context` cached tokens."""
        ...

    def prompt(self, tokens: float, rows: float, chunks: int) -> ForwardSeconds:
        """Seconds that a prompt adds to `chunks` forwards of `rows` other rows (0: none)."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ProfileForward:
    """Forwards from a profile.

    Most profiles hold verifications at batch 1 and plain steps at many batches. A forward of B
    sequences with r rows each is composed: the forward of r x B rows over the shortest context,
    plus attention over the cache. That attention is the one of B plain steps, scaled by the ratio
    of r rows to one row at batch 1, and at most B times that of one sequence. Verifications
    measured at larger batches are used as they are. With `unsplit`, attention of several rows takes
    at least what it takes in an engine that does not split its keys.
    """

    profile: Profile
    unsplit: bool = False

    @property
    def architecture(self) -> ModelArchitecture:
        """The target's architecture."""
        return self.profile.target.architecture

    @property
    def value_bytes(self) -> ValueBytes:
        """Those of the profile's dtype, and of its quantised weights."""
        runtime = self.profile.runtime
        size = float(runtime.element_bytes)
        return ValueBytes(
            weight=runtime.weight_bytes or size, embedding=size, cached=runtime.cache_bytes or size
        )

    @property
    def tensor_parallel(self) -> int:
        """Number of devices that share the target."""
        return self.profile.runtime.tensor_parallel

    @property
    def device(self) -> DeviceLimits:
        """The device, with the profile's power limit, else the TDP of the data sheet."""
        device = self.profile.device
        power_w = device.power_limit_w or (self._device.tdp_w if self._device else None)
        return DeviceLimits(name=device.name, memory_bytes=device.memory_bytes, power_w=power_w)

    @property
    def origin(self) -> Origin:
        """The profile's provenance; `error` is its held-out error, else its error bar."""
        made, held_out = self.profile.provenance, self.profile.held_out
        error = UNKNOWN_ERROR if made.error_bar is None else made.error_bar
        if held_out is not None:
            error = held_out.error.mape
        return Origin(
            kind=made.kind,
            text=made.source or f"{made.kind} {made.created_utc[:10]}",
            error=error,
            whole_runtime=self.profile.runtime.kind != "kernels",
            engine="vllm" if self.profile.runtime.kind == "vllm" else "rooftree",
            host_s=(engine.host_s or 0.0) if (engine := self.profile.runtime.engine) else 0.0,
        )

    def decode(self, batch: float, context: float, rows: int = 1) -> ForwardSeconds:
        """Seconds of `rows` rows for each of `batch` sequences with `context` cached tokens.

        The part of all-reduces is estimated from published ones; without any it is in the products.
        """
        whole = self._decode(batch, context, self._bucket(rows) if rows > 1 else rows)
        if self.unsplit and rows > 1 and self._device is not None:
            shape = batch, context, rows
            walk_s = unsplit_attention_s(
                self._device, self.architecture, shape, self.tensor_parallel
            )
            whole = dataclasses.replace(whole, attention=max(whole.attention, walk_s))
        if not self._protocols:
            return whole
        message_bytes = self.profile.runtime.element_bytes * batch * rows * self.architecture.hidden
        one_s = float(all_reduce_s(self._protocols, message_bytes))
        reduced_s = min(2 * self.architecture.layers * one_s, whole.products)
        return dataclasses.replace(whole, products=whole.products - reduced_s, all_reduce=reduced_s)

    def _decode(self, batch: float, context: float, rows: int) -> ForwardSeconds:
        """Seconds of a whole bucket of rows, all-reduces among the products."""
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
        return ForwardSeconds(products=fixed, attention=self._attention_s(batch, context, rows))

    def prompt(self, tokens: float, rows: float, chunks: int) -> ForwardSeconds:
        """Seconds that a prompt adds to `chunks` forwards of `rows` other rows (0: none)."""
        part = tokens / chunks
        added = self._prompt_rows_s(part + rows) - (self._prompt_rows_s(rows) if rows else 0.0)
        return ForwardSeconds(
            products=chunks * max(added, 0.0), attention=self._prompt_square_s * tokens**2
        )

    @cached_property
    def _device(self) -> DeviceSpec | None:
        return device_by_name(self.profile.device.name)

    @cached_property
    def _protocols(self) -> tuple[LinkProtocol, ...]:
        return self.profile.roofline().protocols

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
        """Seconds of a plain step; None at a larger batch than 1 where one batch was measured."""
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
        times = [_measured_s(plain, max(context, self._least_context), b) for b in near]
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
        if self._device is None:
            return 1.0
        tiles = self.architecture.heads / self.tensor_parallel * np.ceil(rows / _TILE_ROWS)
        return float(min(tiles / self._device.sm_count, 1.0))

    def _cached_s(self, rows: int, context: float) -> float:
        """Seconds that cached tokens add to a verification at batch 1."""
        added = self._verify_s(rows, context) - self._verify_s(rows, self._least_context)
        return max(added, 0.0)

    def _prompt_rows_s(self, rows: float) -> float:
        """Seconds of a prompt's forward, without the part that grows with its squared length."""
        prefill = self.profile.stages.prefill
        if prefill is None:
            return self._verify_s(max(rows, 1.0), self._least_context)
        return float(prefill.seconds(rows)) - self._prompt_square_s * rows**2

    @cached_property
    def _prompt_square_s(self) -> float:
        """Seconds of a prompt's attention per squared token, fitted to long prompts."""
        prefill = self.profile.stages.prefill
        if prefill is None:
            return 0.0
        tokens, seconds = np.array(prefill.tokens, float), np.array(prefill.median_s)
        long = tokens >= _LONG_PROMPT
        if np.count_nonzero(long) < 3:
            return 0.0
        weight = 1 / seconds[long]
        powers = np.vander(tokens[long], 3)
        fitted = np.linalg.lstsq(powers * weight[:, None], np.ones(len(weight)), rcond=None)[0]
        return max(float(fitted[0]), 0.0)


def refuse_beyond_tables(architecture: ModelArchitecture) -> None:
    """Raise InputError for a target whose operators no table for servers holds."""
    if reason := architecture.beyond_tables:
        raise InputError(f"no plan of {architecture.name} from operator tables: {reason}")


def _split(fixed: float, total: float) -> ForwardSeconds:
    return ForwardSeconds(products=min(fixed, total), attention=max(total - fixed, 0.0))


def _measured_s(plain: PlainSection, context: float, batch: int) -> float:
    seconds = plain.seconds(context, batch)
    if seconds is None:
        raise InputError(f"no plain step of batch {batch} was measured")
    return seconds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServingForward:
    """Forwards of a dense target, summed from operator tables at a serving precision.

    `tensor_parallel` devices share heads, FFN and vocabulary evenly. Norms, rotary embedding and
    activation are part of the fitted overhead per layer. Raises InputError for a target that
    cannot be split so, has experts, or has other heads than the tables.
    """

    architecture: ModelArchitecture
    tables: ServingTables
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        a, tp = self.architecture, self.tensor_parallel
        if tp < 1 or a.heads % tp or a.kv_heads % tp or a.ffn % tp:
            raise InputError(
                f"tensor_parallel {tp} does not divide {a.heads} heads, {a.kv_heads} key-value"
                f" heads and the FFN width {a.ffn}"
            )
        refuse_beyond_tables(a)
        if self.tables.head_dim != a.head_dim:
            raise InputError(
                f"the attention tables are for heads of size {self.tables.head_dim},"
                f" {a.name} has {a.head_dim}"
            )

    @property
    def value_bytes(self) -> ValueBytes:
        """Those of the tables' precision."""
        precision = self.tables.precision
        return ValueBytes(weight=precision.weight_bytes, cached=precision.cache_bytes)

    @property
    def device(self) -> DeviceLimits:
        """The device."""
        device = self.tables.device
        return DeviceLimits(
            name=device.name, memory_bytes=device.memory_bytes, power_w=device.tdp_w
        )

    @property
    def origin(self) -> Origin:
        """The tables; their error is part of the server model's (`sizing.SERVER_ERROR`)."""
        return Origin(kind="operators", text=self.tables.source, error=0.0)

    def decode(self, batch: float, context: float, rows: int = 1) -> ForwardSeconds:
        """Seconds of `rows` rows for each of `batch` sequences with `context` cached tokens."""
        a, tp, total = self.architecture, self.tensor_parallel, batch * rows
        head = self.tables.head_s(np.array([float(total)]), a.vocab // tp, a.hidden)
        return ForwardSeconds(
            products=self._products_s(total) + float(head[0]),
            attention=self._decode_attention_s(batch, context, rows),
            all_reduce=self._all_reduce_s(total),
        )

    def prompt(self, tokens: float, rows: float, chunks: int) -> ForwardSeconds:
        """Seconds that a prompt adds to `chunks` forwards of `rows` other rows (0: none).

        A forward with other rows reads the weights anyway.
        """
        part = tokens / chunks
        products = self._products_s(part + rows) - self._products_s(rows)
        all_reduce = self._all_reduce_s(part + rows) - self._all_reduce_s(rows)
        a, tp = self.architecture, self.tensor_parallel
        heads, kv_heads = a.heads // tp, a.kv_heads // tp
        attention = prompt_attention_s(self.tables.attention, a, int(tokens), (heads, kv_heads))
        return ForwardSeconds(
            products=chunks * products,
            attention=attention,
            all_reduce=chunks * all_reduce,
        )

    def _products_s(self, tokens: float) -> float:
        a, tp = self.architecture, self.tensor_parallel
        if tokens <= 0:
            return 0.0
        rows = np.array([float(tokens)])
        query, key = a.query_width // tp, a.kv_width // tp
        shapes = (
            (query + 2 * key, a.hidden),
            (a.hidden, query),
            ((a.ffn_matrices - 1) * a.ffn // tp, a.hidden),
            (a.hidden, a.ffn // tp),
        )
        layer = sum(float(self.tables.product_s(rows, n, k)[0]) for n, k in shapes)
        return a.layers * layer

    def _decode_attention_s(self, batch: float, context: float, rows: int) -> float:
        a = self.architecture
        if a.sliding_window is None:
            return a.layers * self._layer_attention_s(batch, context, rows)
        seen = min(context, a.sliding_window)
        windowed = (a.layers - a.full_layers) * self._layer_attention_s(batch, seen, rows)
        return windowed + a.full_layers * self._layer_attention_s(batch, context, rows)

    def _layer_attention_s(self, batch: float, context: float, rows: int) -> float:
        a, tp = self.architecture, self.tensor_parallel
        # The table holds whole batches: between two of them its logarithm is interpolated.
        measured = self.tables.attention.seconds(
            rows, [context], max(round(batch), 1), a.heads // tp, a.kv_heads // tp
        )
        moved = batch * context * a.cached_width / tp * self.tables.precision.cache_bytes
        return max(float(measured[0]), moved / self.tables.read_bytes_per_s)

    def _all_reduce_s(self, tokens: float) -> float:
        if self.tensor_parallel == 1 or tokens <= 0:
            return 0.0
        values = np.array([tokens * self.architecture.hidden])
        one = float(self.tables.all_reduce_s(values, self.tensor_parallel)[0])
        return 2 * self.architecture.layers * one
