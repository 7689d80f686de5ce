"""Operator tables of a device, and a target's forward summed from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.architecture import ModelArchitecture
from costmodel.catalog import DeviceSpec, Peaks
from costmodel.compose.attention import Attention, interpolate
from costmodel.compose.matmul import MatmulTable
from costmodel.errors import InputError
from costmodel.roofline import Roofline, distinct_experts
from costmodel.weights import CACHE_BYTES, WEIGHT_BYTES, Cache, Weights, layer_bytes

Array = NDArray[np.float64]
SmallKind = Literal["embedding", "norm", "rotary", "activation"]
# Dense rate as a multiple of bfloat16's (NVIDIA data sheets of Hopper and Blackwell).
_SPEEDUP = {
    "bfloat16": 1.0, "fp8": 2.0, "fp8_dynamic": 2.0, "fp8_block": 2.0, "nvfp4": 4.0, "mxfp4": 1.0,
}  # fmt: skip

# Values read and written per output value. A norm also adds the residual; an activation reads gate
# and up; rotary embedding writes back its input.
MOVED = {"embedding": 2, "norm": 4, "rotary": 2, "activation": 3}
# Rows of a tile of the chunk rule. Up to it a tree takes the time of a chain: both solve one
# triangular system, under the ancestors' mask or the causal one. Behind it a chain carries its
# state from tile to tile, which branches cannot share.
CHUNK_ROWS = 64
# Speed of the L2 cache over memory, for values that the previous kernel left there.
_CACHE_SPEEDUP = 3.0


class SmallOperators(Protocol):
    """Times of norms, rotary embedding, activation and embedding."""

    def seconds(self, kind: SmallKind, rows: Array, width: int) -> Array:
        """Seconds of one call over `rows` [rows] of `width` values each."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BytesAtBandwidth:
    """Small operators as a launch plus memory traffic; up to half the L2 cache counts as cached."""

    launch_s: float
    device: DeviceSpec
    element_bytes: float = 2

    def seconds(self, kind: SmallKind, rows: Array, width: int) -> Array:
        """Launch plus bytes over bandwidth [rows]."""
        moved = MOVED[kind] * self.element_bytes * rows * width
        speedup = np.where(moved <= self.device.l2_bytes / 2, _CACHE_SPEEDUP, 1.0)
        seconds: Array = self.launch_s + moved / (self.device.peak_bytes_per_s * speedup)
        return seconds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredSmall:
    """Small operators measured over row counts at one width; equal bytes take equal time."""

    tables: Mapping[SmallKind, tuple[Array, Array]]
    widths: Mapping[SmallKind, int]

    def seconds(self, kind: SmallKind, rows: Array, width: int) -> Array:
        """Interpolation over rows x width [rows]; proportional beyond the last point."""
        grid, seconds = self.tables[kind]
        place = rows * (width / self.widths[kind])
        inside = np.interp(place, grid, seconds)
        return np.asarray(inside * np.maximum(place / grid[-1], 1.0), dtype=np.float64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertTable:
    """Times of a layer's experts by tokens, for one (hidden, expert width, active, experts).

    `balanced`: the measured tokens were spread over as many distinct experts as possible, so the
    table gives the time by distinct experts. Otherwise the table's own skew is used as it is.
    """

    tokens: Array
    seconds_measured: Array
    balanced: bool

    def seconds(self, architecture: ModelArchitecture, tokens: Array) -> Array:
        """Seconds [tokens] at the expected number of distinct experts."""
        measured = np.interp(tokens, self.tokens, self.seconds_measured)
        beyond = np.maximum(tokens / self.tokens[-1], 1.0)
        if not self.balanced:
            return np.asarray(measured * beyond, dtype=np.float64)
        all_used = architecture.experts / architecture.active_experts
        equivalent = distinct_experts(architecture, tokens) / architecture.active_experts
        few = np.interp(equivalent, self.tokens, self.seconds_measured)
        full = np.interp(all_used, self.tokens, self.seconds_measured)
        scaled = np.where(tokens < all_used, few, measured * beyond * few / full)
        return np.asarray(scaled, dtype=np.float64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecurrentTable:
    """Times of one layer's convolution and gated delta rule: {(sequences, rows of each): seconds}.

    `plain`: the recurrent form of one row; `several`: the chunk form.
    """

    plain: Mapping[tuple[int, int], float]
    several: Mapping[tuple[int, int], float]

    def seconds(self, rows: Array, batch: int) -> Array:
        """Seconds of `rows` rows of each of `batch` sequences [rows]; linear over sequences."""
        curve = sorted((measured, seconds) for (measured, _), seconds in self.plain.items())
        batches, plain_s = np.array(curve, dtype=np.float64).T
        one_s = np.interp(batch, batches, plain_s) * max(batch / batches[-1], 1.0)
        more_s = interpolate(self.several, rows, batch)
        return np.where(rows > 1, more_s, one_s)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperatorTables:
    """Operators of one device, from which a forward is summed.

    `fused`: query, key and value are one product, and so are gate and up. `tensor_parallel`: the
    degree that was measured (None: any). `experts` is keyed by (hidden, expert width, active,
    experts, devices that share each expert, groups that share the experts), `recurrent` by one
    device's key heads, value heads, their two dimensions and the width of the convolution;
    `all_reduce` has (values, seconds) by number of devices. `matmul` is
    of `weights`, the LM head's product, `head`, of bfloat16; None where both are the same.
    """

    device: DeviceSpec
    engine: str
    source: str
    matmul: MatmulTable
    attention: Attention
    small: SmallOperators
    head_dim: int
    fused: bool = True
    tensor_parallel: int | None = None
    experts: Mapping[tuple[int, ...], ExpertTable] = dataclasses.field(default_factory=dict)
    recurrent: Mapping[tuple[int, ...], RecurrentTable] = dataclasses.field(default_factory=dict)
    all_reduce: Mapping[int, tuple[Array, Array]] = dataclasses.field(default_factory=dict)
    weights: Weights = "bfloat16"
    cache: Cache = "bfloat16"
    head: MatmulTable | None = None

    @property
    def peaks(self) -> Peaks:
        """The device's peaks for products of these weights."""
        return product_peaks(self.device, self.weights)

    def expert_table(
        self, architecture: ModelArchitecture, split: tuple[int, int] = (1, 1)
    ) -> ExpertTable:
        """The table of this target's experts. Raises InputError where there is none.

        split  devices that share each expert, and groups that share the experts
        """
        a = architecture
        shape = (*a.expert_shape, *split)
        if shape not in self.experts:
            devices = split[0] * split[1]
            over = f" over {devices} devices" if devices > 1 else ""
            over += " by whole experts" if split[1] > 1 else ""
            raise InputError(
                f"the {self.engine} tables of {self.device.name} have no {self.weights} experts of"
                f" {a.hidden} x {a.expert_ffn}, {a.active_experts} of {a.experts}{over}",
                hint="Measure the target with `rooftree calibrate`",
            )
        return self.experts[shape]

    def recurrent_table(self, architecture: ModelArchitecture, degree: int) -> RecurrentTable:
        """The table of this target's recurrent layers. Raises InputError where there is none."""
        a = architecture
        heads = a.state_groups // degree, a.state_heads // degree
        shape = (*heads, a.state_key_dim, a.state_value_dim, a.conv_width)
        if shape not in self.recurrent:
            raise InputError(
                f"the {self.engine} tables of {self.device.name} have no gated delta rule of"
                f" {heads[0]} and {heads[1]} heads, {shape[2]} x {shape[3]}",
                hint="Measure the target with `rooftree calibrate`",
            )
        return self.recurrent[shape]


def product_peaks(device: DeviceSpec, weights: Weights) -> Peaks:
    """The peaks of a device for products of these weights, of 16-bit ones without others."""
    few_bits = device.fp4_flops_per_s if weights == "nvfp4" else device.fp8_flops_per_s
    speedup = _SPEEDUP[weights] if few_bits else 1.0
    return Peaks(flops_per_s=device.peak_flops_per_s * speedup, bytes_per_s=device.peak_bytes_per_s)


# Profiles keep six digits; this factor keeps a time at the roofline from being rounded below it.
ROUNDING = 1.0 + 1e-5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComposedForward:
    """Kernel seconds of a target's forwards, without host time and gaps.

    `tensor_parallel` devices share heads, FFN and vocabulary evenly. The sum is that of one device,
    with two all-reduces a layer where they were measured. `data_parallel` groups of them, each
    with sequences of its own, share the experts of a mixture: seconds are of one group, with as
    many rows in the others, and an all-reduce stands for the rows' way to the experts and back.
    With `expert_parallel` a device has whole experts, otherwise a part of each. Raises InputError
    for a target that cannot be split so, or that the tables do not cover.
    """

    architecture: ModelArchitecture
    tables: OperatorTables
    tensor_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: bool = False

    def __post_init__(self) -> None:
        a, tp = self.architecture, self.tensor_parallel
        if tp < 1 or a.heads % tp or (a.kv_heads % tp and tp % a.kv_heads):
            raise InputError(
                f"tensor_parallel {tp} does not divide {a.heads} heads and {a.kv_heads}"
                " key-value heads"
            )
        if (not a.experts or a.sparse_layers < a.layers) and a.ffn % tp:
            raise InputError(f"tensor_parallel {tp} does not divide the FFN width {a.ffn}")
        if not a.experts and (self.data_parallel > 1 or self.expert_parallel):
            raise InputError(
                f"{a.name} has no experts to share",
                hint="Data-parallel groups of it are servers of their own: leave the option out",
            )
        refuse_beyond_tables(a)
        if a.shared_ffn % tp:
            raise InputError(f"tensor_parallel {tp} does not divide the FFN width {a.shared_ffn}")
        if self.tables.head_dim != a.head_dim:
            raise InputError(
                f"the attention tables are for heads of size {self.tables.head_dim},"
                f" {a.name} has {a.head_dim}"
            )
        measured = self.tables.tensor_parallel
        if measured is not None and measured != tp:
            raise InputError(f"these operator tables are of tensor_parallel {measured}, not {tp}")
        if a.recurrent:
            if a.state_heads % tp or a.state_groups % tp:
                raise InputError(
                    f"tensor_parallel {tp} does not divide {a.state_heads} and {a.state_groups}"
                    " heads of a state"
                )
            self.tables.recurrent_table(a, tp)
        if a.experts:
            if a.experts % self.data_parallel:
                raise InputError(
                    f"data_parallel {self.data_parallel} does not divide {a.experts} experts"
                )
            self._experts()

    @property
    def devices(self) -> int:
        """Devices that share the experts, or all weights."""
        return self.tensor_parallel * self.data_parallel

    @property
    def group(self) -> ModelArchitecture:
        """What one data-parallel group holds: with its rows as many of its experts are in use."""
        a, count = self.architecture, self.architecture.experts // self.data_parallel
        return dataclasses.replace(a, experts=count, active_experts=min(count, a.active_experts))

    @property
    def experts_balanced(self) -> bool:
        """Whether the experts' times are those of the expected number of distinct ones."""
        return self._experts().balanced

    def _experts(self) -> ExpertTable:
        devices = self.devices
        split = (1, devices) if self.expert_parallel else (devices, 1)
        return self.tables.expert_table(self.architecture, split)

    @property
    def _heads(self) -> tuple[int, int]:
        """Query heads and key-value heads of one device, which several may have alike."""
        a, tp = self.architecture, self.tensor_parallel
        return a.heads // tp, max(a.kv_heads // tp, 1)

    def verifying(self) -> ComposedForward:
        """The same target with attention as a verification of few rows runs it."""
        attention = self.tables.attention.splitting_keys()
        tables = dataclasses.replace(self.tables, attention=attention)
        return dataclasses.replace(self, tables=tables)

    def seconds(self, rows: ArrayLike, context: ArrayLike, batch: int = 1) -> Array:
        """Seconds of `rows` over `context` [rows, contexts], at least the physical roofline's."""
        counts = np.atleast_1d(np.asarray(rows, dtype=np.float64))
        cached = np.atleast_1d(np.asarray(context, dtype=np.float64))
        fixed = self.linear_s(counts * batch) + self.lm_head_s(counts * batch)
        fixed = fixed + self.recurrent_s(counts, batch)
        total = fixed[:, None] + np.stack([self.attention_s(int(s), cached, batch) for s in counts])
        bound = self.roofline("physical").seconds(counts[:, None], cached[None, :], batch)
        return np.maximum(total, ROUNDING * bound)

    def prefill_s(self, tokens: ArrayLike) -> Array:
        """Seconds of prompts of `tokens` [tokens]; the LM head runs on the last token only."""
        counts = np.atleast_1d(np.asarray(tokens, dtype=np.float64))
        attention = [
            prompt_attention_s(self.tables.attention, self.architecture, int(s), self._heads)
            for s in counts
        ]
        last = self.lm_head_s(np.ones(1))
        total: Array = self.linear_s(counts) + self.recurrent_s(counts) + np.array(attention) + last
        return total

    def recurrent_s(self, rows: Array, batch: int = 1) -> Array:
        """Seconds of all convolutions and delta rules over `rows` of each sequence [rows].

        States are read and written once, in float32. Of several rows the chunk rule counts, which
        stands for a verification with the replay of what was accepted before.
        """
        a, tp = self.architecture, self.tensor_parallel
        if not a.recurrent:
            return np.zeros_like(rows)
        layer_s = self.tables.recurrent_table(a, tp).seconds(rows, batch)
        moved_s = 2 * 4 * a.state_values / tp * batch / self.tables.matmul.read_bytes_per_s
        return np.asarray(a.recurrent_layers * np.maximum(layer_s, moved_s), dtype=np.float64)

    def attention_s(self, rows: int, context: Array, batch: int = 1) -> Array:
        """Seconds of all layers' attention, for one row count over each context [contexts]."""
        a = self.architecture
        if a.sliding_window is None:
            return a.attention_layers * self._layer_attention_s(rows, context, batch)
        seen = np.minimum(context, a.sliding_window)
        windowed = (a.layers - a.full_layers) * self._layer_attention_s(rows, seen, batch)
        if not a.full_layers:
            return windowed
        return windowed + a.full_layers * self._layer_attention_s(rows, context, batch)

    def _layer_attention_s(self, rows: int, context: Array, batch: int) -> Array:
        a, tp = self.architecture, min(self.tensor_parallel, self.architecture.kv_heads)
        layer_s = self.tables.attention.seconds(rows, context, batch, *self._heads)
        # Timed alone, keys and values that fit into the L2 cache are read from it; not in a model.
        cached_bytes = CACHE_BYTES[self.tables.cache] * batch * context * a.cached_width / tp
        read_s = cached_bytes / self.tables.matmul.read_bytes_per_s
        return np.asarray(np.maximum(layer_s, read_s), dtype=np.float64)

    def lm_head_s(self, rows: Array) -> Array:
        """Seconds of the LM head over `rows` [rows], all sequences together."""
        a, table = self.architecture, self.tables.head or self.tables.matmul
        return table.seconds(rows, a.vocab // self.tensor_parallel, a.hidden)

    def linear_s(self, rows: Array) -> Array:
        """Seconds of all but attention and LM head over `rows` [rows], all sequences together."""
        a, small = self.architecture, self.tables.small
        layer = a.layer_norms * small.seconds("norm", rows, a.hidden)
        ends = small.seconds("embedding", rows, a.hidden) + small.seconds("norm", rows, a.hidden)
        attention_s = self._all_reduce_s(rows, self.tensor_parallel)
        ffn_s = self._all_reduce_s(rows * self.data_parallel, self.devices)
        layers = a.layers * (layer + attention_s + ffn_s)
        layers = layers + a.attention_layers * self._projections_s(rows)
        layers = layers + a.recurrent_layers * self._recurrent_projections_s(rows)
        total: Array = layers + self._ffn_s(rows) + ends
        return total

    def products(self) -> list[tuple[str, int, int]]:
        """(name, n, k) of a layer's matrix products and of the LM head, on one device."""
        a, tp = self.architecture, self.tensor_parallel
        value, key = a.query_width // tp, a.head_dim * self._heads[1]
        query = value * (2 if a.gated_attention else 1)
        if self.tables.fused:
            shapes = [("query, key and value", query + 2 * key, a.hidden)]
        else:
            shapes = [("query", query, a.hidden), ("key", key, a.hidden), ("value", key, a.hidden)]
        shapes.append(("output", a.hidden, value))
        if a.recurrent:
            inner = a.state_inner // tp
            shapes.append(("state input", a.conv_channels // tp + inner, a.hidden))
            shapes.append(("state gates", 2 * a.state_heads // tp, a.hidden))
            shapes.append(("state output", a.hidden, inner))
        if a.experts:
            shapes.append(("router", a.experts + a.shared_gate, a.hidden))
        if a.shared_ffn:
            shapes += self._dense_products(a.shared_ffn)
        if a.sparse_layers < a.layers:
            shapes += self._dense_products(a.ffn)
        return [*shapes, ("LM head", a.vocab // tp, a.hidden)]

    def _dense_products(self, width: int) -> list[tuple[str, int, int]]:
        """(name, n, k) of the products of an FFN that every token passes."""
        a, split = self.architecture, width // self.tensor_parallel
        if self.tables.fused or not a.gated_ffn:
            first = [("gate and up", (a.ffn_matrices - 1) * split, a.hidden)]
        else:
            first = [("gate", split, a.hidden), ("up", split, a.hidden)]
        return [*first, ("down", a.hidden, split)]

    def extrapolated(self) -> list[str]:
        """One text per product whose size lies outside the measured ones."""
        outside = [(name, self.tables.matmul.outside(n, k)) for name, n, k in self.products()]
        return [f"{name} ({text})" for name, text in outside if text]

    def _projections_s(self, rows: Array) -> Array:
        a, tp, small = self.architecture, self.tensor_parallel, self.tables.small
        names = ("query, key and value", "query", "key", "value", "output")
        total = self._products_s(rows, names)
        heads_width = a.query_width // tp + a.head_dim * self._heads[1]
        if a.qk_norm:
            total = total + small.seconds("norm", rows, heads_width)
        if a.gated_attention:
            total = total + small.seconds("activation", rows, a.query_width // tp)
        return total + small.seconds("rotary", rows, heads_width)

    def _recurrent_projections_s(self, rows: Array) -> Array:
        a = self.architecture
        if not a.recurrent:
            return np.zeros_like(rows)
        products_s = self._products_s(rows, ("state input", "state gates", "state output"))
        inner = a.state_inner // self.tensor_parallel
        return products_s + self.tables.small.seconds("norm", rows, inner)

    def _ffn_s(self, rows: Array) -> Array:
        """Seconds of all layers' FFNs [rows]."""
        a = self.architecture
        total = np.zeros_like(rows)
        if a.sparse_layers < a.layers:
            total = (a.layers - a.sparse_layers) * self._dense_ffn_s(rows, a.ffn)
        if not a.experts:
            return total
        everywhere = rows * self.data_parallel
        measured = self._experts().seconds(a, everywhere)
        used = distinct_experts(a, everywhere) / self.devices
        moved = WEIGHT_BYTES[self.tables.weights] * a.expert_parameters * used
        read_s = moved / self.tables.matmul.read_bytes_per_s
        layer = self._products_s(rows, ("router",)) + np.maximum(measured, read_s)
        if a.shared_ffn:
            layer = layer + self._dense_ffn_s(rows, a.shared_ffn)
        return np.asarray(total + a.sparse_layers * layer, dtype=np.float64)

    def _dense_ffn_s(self, rows: Array, width: int) -> Array:
        matmul, small = self.tables.matmul, self.tables.small
        total = small.seconds("activation", rows, width // self.tensor_parallel)
        for _, n, k in self._dense_products(width):
            total = total + matmul.seconds(rows, n, k)
        return total

    def _products_s(self, rows: Array, names: tuple[str, ...]) -> Array:
        total = np.zeros_like(rows)
        for name, n, k in self.products():
            if name in names:
                total = total + self.tables.matmul.seconds(rows, n, k)
        return total

    def _all_reduce_s(self, rows: Array, devices: int) -> Array:
        if devices == 1 or devices not in self.tables.all_reduce:
            return np.zeros_like(rows)
        size, seconds = self.tables.all_reduce[devices]
        moved = rows * self.architecture.hidden
        beyond = np.maximum(moved / size[-1], 1.0)
        return np.asarray(np.interp(moved, size, seconds) * beyond, dtype=np.float64)

    def roofline(self, count: Literal["paper", "physical"] = "paper") -> Roofline:
        """The roofline at the tables' precision."""
        return Roofline(
            architecture=self.group,
            peaks=self.tables.peaks,
            count=count,
            tensor_parallel=self.tensor_parallel,
            weight_bytes=layer_bytes(self.architecture, self.tables.weights),
            cache_bytes=CACHE_BYTES[self.tables.cache],
        )


def refuse_beyond_tables(architecture: ModelArchitecture) -> None:
    """Raise InputError for a target with layers that no table holds."""
    if architecture.beyond_tables:
        raise InputError(
            f"no forward of {architecture.name} is composed: {architecture.beyond_tables}"
        )


def prompt_attention_s(
    attention: Attention, architecture: ModelArchitecture, tokens: int, heads: tuple[int, int]
) -> float:
    """Seconds of all layers' attention in a prompt of `tokens`; `heads` are those of one device.

    Under a sliding window of w the pairs of row and key are 2 tokens / w - 1 times those of w
    tokens.
    """
    a = architecture
    full = attention.on_nothing(tokens, 1, *heads)
    if a.sliding_window is None or tokens <= a.sliding_window:
        return a.attention_layers * full
    windowed = attention.on_nothing(a.sliding_window, 1, *heads)
    windowed *= 2 * tokens / a.sliding_window - 1
    return a.full_layers * full + (a.layers - a.full_layers) * min(windowed, full)
