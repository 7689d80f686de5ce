"""The measured operators of one device, whatever they were read from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from costmodel.architecture import ModelArchitecture
from costmodel.compose.attention import Attention
from costmodel.compose.matmul import MatmulTable
from costmodel.device import DeviceSpec
from costmodel.errors import InputError
from costmodel.roofline import distinct_experts

Array = NDArray[np.float64]
SmallKind = Literal["embedding", "norm", "rotary", "activation"]

# Values read and written per output value: a norm also adds the residual, an activation reads
# gate and up, rotary embedding writes what it read.
MOVED = {"embedding": 2, "norm": 4, "rotary": 2, "activation": 3}
# A cache serves what the kernel before left in it several times faster than memory does.
_CACHE_SPEEDUP = 3.0


class SmallOperators(Protocol):
    """Norms, rotary embedding, activation, embedding."""

    def seconds(self, kind: SmallKind, rows: Array, width: int) -> Array:
        """Seconds of one call over `rows` rows of `width` values."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BytesAtBandwidth:
    """Small operators as a launch and their traffic; what fits in half the cache stays there."""

    launch_s: float
    device: DeviceSpec
    element_bytes: float = 2

    def seconds(self, kind: SmallKind, rows: Array, width: int) -> Array:
        """Launch + bytes / bandwidth."""
        moved = MOVED[kind] * self.element_bytes * rows * width
        speedup = np.where(moved <= self.device.l2_bytes / 2, _CACHE_SPEEDUP, 1.0)
        seconds: Array = self.launch_s + moved / (self.device.peak_bytes_per_s * speedup)
        return seconds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredSmall:
    """Small operators as measured over row counts at one width; equal bytes take equal time."""

    tables: Mapping[SmallKind, tuple[Array, Array]]
    widths: Mapping[SmallKind, int]

    def seconds(self, kind: SmallKind, rows: Array, width: int) -> Array:
        """Interpolated over rows x width; beyond the last point in proportion."""
        grid, seconds = self.tables[kind]
        place = rows * (width / self.widths[kind])
        inside = np.interp(place, grid, seconds)
        return np.asarray(inside * np.maximum(place / grid[-1], 1.0), dtype=np.float64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertTable:
    """A layer's experts, by tokens, for one (hidden, expert width, active, experts).

    `balanced`: tokens were spread so that each used experts that no other did, as far as there
    are any; the time by the number of distinct experts follows from it. Otherwise the table's
    own skew of choices is taken as it is.
    """

    tokens: Array
    seconds_measured: Array
    balanced: bool

    def seconds(self, architecture: ModelArchitecture, tokens: Array) -> Array:
        """Seconds with the expected number of distinct experts of so many tokens."""
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
class OperatorTables:
    """Everything that a forward is summed from.

    `fused`: query, key and value are one product, gate and up another. `experts`: by (hidden,
    expert width, active, experts). `all_reduce`: (values, seconds) by number of devices.
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
    experts: Mapping[tuple[int, int, int, int], ExpertTable] = dataclasses.field(
        default_factory=dict
    )
    all_reduce: Mapping[int, tuple[Array, Array]] = dataclasses.field(default_factory=dict)

    def expert_table(self, architecture: ModelArchitecture) -> ExpertTable:
        """The experts of this target. Raises InputError where they were not measured."""
        a = architecture
        key = (a.hidden, a.expert_ffn, a.active_experts, a.experts)
        if key not in self.experts:
            raise InputError(
                f"the {self.engine} tables of {self.device.name} have no experts of"
                f" {a.hidden} x {a.expert_ffn}, {a.active_experts} of {a.experts}",
                hint="Measure the target with `rooftree calibrate`",
            )
        return self.experts[key]
