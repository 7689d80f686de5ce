"""Operator tables of one device: products, attention, small operators, experts, recurrences."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from costmodel.architecture import ModelArchitecture
from costmodel.catalog import DeviceSpec, Peaks
from costmodel.compose.attention import Attention, LatentTable, interpolate
from costmodel.compose.matmul import MatmulTable
from costmodel.errors import InputError
from costmodel.plugins import OPERATOR_TABLES, load_plugins
from costmodel.roofline import distinct_experts
from costmodel.statistics import Array
from costmodel.weights import WEIGHT_BYTES, Cache, Weights

SmallKind = Literal["embedding", "norm", "rotary", "activation"]
# Dense rate as a multiple of bfloat16's (NVIDIA data sheets of Hopper and Blackwell).
_SPEEDUP = {
    "bfloat16": 1.0, "fp8": 2.0, "fp8_dynamic": 2.0, "fp8_block": 2.0, "nvfp4": 4.0, "mxfp4": 1.0,
}  # fmt: skip

# Values read and written per output value. A norm also adds the residual; an activation reads gate
# and up; rotary embedding writes back its input.
MOVED = {"embedding": 2, "norm": 4, "rotary": 2, "activation": 3}
# Speed of the L2 cache over memory, for values that the previous kernel left there.
_CACHE_SPEEDUP = 3.0
# Experts of which no table is read: seconds of launches, shares of bandwidth and FLOPs.
_EXPERT_S, _EXPERT_READ, _EXPERT_RATE = 20e-6, 0.6, 0.4


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
class ExpertTable:
    """Times of a layer's experts by tokens, for one (hidden, expert width, active, experts).

    `balanced`: the measured tokens were spread over as many distinct experts as possible, so the
    table gives the time by distinct experts. Otherwise the table's own skew is used as it is.
    `estimated`: nothing was measured. `form`: the type of weights whose times these are, where the
    experts' own were measured slower than in bfloat16, or faster than the memory. `wider`: the
    table of 16-bit weights, whose times none of these exceeds; `narrower`: one of fewer bits, below
    whose times none of these falls. `skewed`: of tokens that are spread by a power law, where even
    spreading was measured too. Routers lie in between: the geometric mean of both is taken, for few
    tokens at most the expected distinct experts.
    """

    tokens: Array
    seconds_measured: Array
    balanced: bool
    estimated: bool = False
    form: str = ""
    wider: ExpertTable | None = None
    narrower: ExpertTable | None = None
    skewed: ExpertTable | None = None

    def measured_at(self, tokens: Array) -> Array:
        """Seconds [tokens] between the measured ones, and as the outermost beyond them."""
        return np.asarray(np.interp(tokens, self.tokens, self.seconds_measured), dtype=np.float64)

    def seconds(self, architecture: ModelArchitecture, tokens: Array) -> Array:
        """Seconds [tokens] at the expected number of distinct experts."""
        own_s = self._own_s(architecture, tokens)
        for limit, table in ((np.minimum, self.wider), (np.maximum, self.narrower)):
            own_s = own_s if table is None else limit(own_s, table.seconds(architecture, tokens))
        return own_s

    def _own_s(self, architecture: ModelArchitecture, tokens: Array) -> Array:
        measured = self.measured_at(tokens)
        beyond = np.maximum(tokens / self.tokens[-1], 1.0)
        if not self.balanced:
            return np.asarray(measured * beyond, dtype=np.float64)
        all_used = architecture.experts / architecture.active_experts
        equivalent = distinct_experts(architecture, tokens) / architecture.active_experts
        few = self.measured_at(equivalent)
        full = self.measured_at(np.array(all_used))
        scaled = np.where(tokens < all_used, few, measured * beyond * few / full)
        if self.skewed is not None:
            routed = self.skewed._own_s(architecture, tokens)
            routed = np.where(tokens < all_used, np.minimum(few, routed), routed)
            scaled = np.sqrt(scaled * routed)
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
    experts, devices that share each expert, groups that share the experts), so are those in
    another type (of bfloat16: fp8, else bfloat16) that bound estimates; `recurrent` by one
    device's key heads, value heads, their two dimensions and the width of the convolution;
    `latent` reads latent attention by the ranks of a cached token and the sizes of a head, and
    where an indexer chooses tokens by heads and their number; `all_reduce` has (values, seconds)
    by number of devices. `matmul` is of `weights`, the LM head's product, `head`, of bfloat16; None
    where both are the same.
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
    other_experts: Mapping[tuple[int, ...], ExpertTable] = dataclasses.field(default_factory=dict)
    recurrent: Mapping[tuple[int, ...], RecurrentTable] = dataclasses.field(default_factory=dict)
    latent: Callable[[], Mapping[tuple[int, ...], LatentTable]] = dict
    all_reduce: Mapping[int, tuple[Array, Array]] = dataclasses.field(default_factory=dict)
    weights: Weights = "bfloat16"
    cache: Cache = "bfloat16"
    head: MatmulTable | None = None

    @property
    def read_bytes_per_s(self) -> float:
        """Bytes/s at which values in memory are read, by the products that read them fastest."""
        return max(table.read_bytes_per_s for table in (self.matmul, self.head or self.matmul))

    @property
    def peaks(self) -> Peaks:
        return product_peaks(self.device, self.weights)

    def expert_table(
        self, architecture: ModelArchitecture, split: tuple[int, int] = (1, 1)
    ) -> ExpertTable:
        """The table of this target's experts, estimated from bytes and FLOPs where there is none.

        split  devices that share each expert, and groups that share the experts
        """
        a = architecture
        shape = a.hidden, a.expert_ffn, a.active_experts, a.experts, *split
        if (table := self.experts.get(shape)) is not None:
            return table
        tokens, devices = np.array([2.0**power for power in range(15)]), split[0] * split[1]
        used = np.minimum(tokens * a.active_experts, a.experts) / devices
        moved = used * WEIGHT_BYTES[self.weights] * a.expert_parameters
        flops = 2 * tokens * a.active_experts * a.expert_parameters / devices
        seconds = _EXPERT_S + moved / (_EXPERT_READ * self.device.peak_bytes_per_s)
        seconds = seconds + flops / (_EXPERT_RATE * self.peaks.flops_per_s)
        other = self.other_experts.get(shape)
        plain = self.weights == "bfloat16"
        return ExpertTable(
            tokens=tokens, seconds_measured=seconds, balanced=True, estimated=True,
            narrower=other if plain else None, wider=None if plain else other,
        )  # fmt: skip

    def latent_table(self, architecture: ModelArchitecture, degree: int) -> LatentTable | None:
        """The table of this target's latent attention; None where it must be estimated."""
        a, heads = architecture, architecture.heads // degree
        if not a.latent_rank or a.index_layers not in (0, a.attention_layers):
            return None
        sizes = (a.latent_rank, a.rope_dim, a.head_dim, a.value_dim)
        table = self.latent().get((*sizes, a.heads, a.index_topk) if a.index_layers else sizes)
        return table if table and heads in table.generation and heads in table.context else None

    def recurrent_table(
        self, architecture: ModelArchitecture, degree: int
    ) -> RecurrentTable | None:
        """The table of this target's recurrent layers; None where they must be estimated."""
        a = architecture
        heads = a.state_groups // degree, a.state_heads // degree
        shape = (*heads, a.state_key_dim, a.state_value_dim, a.conv_width)
        return self.recurrent.get(shape) if a.recurrent == "gated_delta" else None


def product_peaks(device: DeviceSpec, weights: Weights) -> Peaks:
    """The peaks of a device for products of these weights, of 16-bit ones without others."""
    few_bits = device.fp4_flops_per_s if weights == "nvfp4" else device.fp8_flops_per_s
    speedup = _SPEEDUP[weights] if few_bits else 1.0
    return Peaks(flops_per_s=device.peak_flops_per_s * speedup, bytes_per_s=device.peak_bytes_per_s)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PublishedTables:
    """Operator tables that somebody publishes: an entry point `published.NAME`.

    engines       whose kernels they time
    devices       slugs of the devices that they are of
    is_installed  whether their files are at hand
    load          the tables of a device and engine; keywords: `head_dim`, `experts`, `weights`,
                  `cache`. Raises InputError or DeviceError
    """

    engines: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    is_installed: Callable[[], bool] = lambda: False
    load: Callable[..., OperatorTables]


@cache
def published_tables() -> PublishedTables:
    """The tables of the first entry point; without one there are none of any device."""
    without = PublishedTables(load=_without_tables)
    return next((tables for _, tables in load_plugins(OPERATOR_TABLES, "published.")), without)


def _without_tables(*given: Any, **options: Any) -> OperatorTables:
    raise InputError("no package plugs in published operator tables")


def folder_tables(folder: Path, source: str = "") -> OperatorTables:
    """The tables in a folder, by the first entry point `folder.NAME` that reads it.

    Raises InputError, of the first one where none does.
    """
    failures = []
    for _, read in load_plugins(OPERATOR_TABLES, "folder."):
        try:
            tables: OperatorTables = read(folder, source)
            return tables
        except InputError as failure:
            failures.append(failure)
    raise next(iter(failures), InputError("no package plugs in a reader of folders of tables"))
