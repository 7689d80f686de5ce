"""Matrix products between measured shapes, by interpolation in utilisation."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import ArrayLike

from costmodel.catalog import Peaks
from costmodel.errors import InputError
from costmodel.statistics import Array

Shape = tuple[int, int]

# Largest factor between a matrix and the measured sizes; beyond it another kernel may run. A wider
# product only repeats the tiles of the widest measured one.
FARTHEST = 4.0
WIDEST = 8.0
_NEIGHBOURS = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MatmulTable:
    """Seconds of y[m, n] = x[m, k] w[n, k], measured over m at some (n, k).

    `shapes` maps (n, k) to ascending m and their seconds. Between shapes the utilisation is
    interpolated (time at the peaks over measured time), which varies far less than time does.
    Weights that fit into the `l2_bytes` of cache are timed from it. In a forward they never are,
    because other weights pass through in between; so no time is below that of reading the weights.
    No product takes longer than in `wider`, the table of 16-bit weights: what was measured then is
    the scaling of its input, or a kernel that nobody tuned.
    """

    shapes: Mapping[Shape, tuple[Array, Array]]
    peaks: Peaks
    l2_bytes: int
    element_bytes: float = 2
    wider: MatmulTable | None = None
    read_bytes_per_s: float = dataclasses.field(init=False)
    _sizes: tuple[list[int], list[int]] = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.shapes:
            raise InputError("the operator tables hold no matrix products")
        sizes = tuple(sorted(set(sizes)) for sizes in zip(*self.shapes, strict=True))
        object.__setattr__(self, "_sizes", sizes)
        # Bytes/s of reading weights much larger than the cache, at most the peak.
        rates, peak = [], self.peaks.bytes_per_s
        for (n, k), (m, seconds) in self.shapes.items():
            weight_bytes = n * k * self.element_bytes
            if weight_bytes >= 3 * self.l2_bytes and m[0] <= 16:
                rates.append(weight_bytes / float(np.min(seconds[m <= 16])))
        object.__setattr__(self, "read_bytes_per_s", min(max(rates, default=peak), peak))

    def seconds(self, rows: ArrayLike, n: int, k: int) -> Array:
        """Seconds [rows] by row count. Raises InputError for (n, k) far from all measured ones."""
        m = np.asarray(rows, dtype=np.float64)
        near = _neighbours(self.shapes, self._sizes, n, k)
        log_share = np.zeros_like(m)
        for shape, weight in near:
            log_share += weight * np.log(self._measured(m, shape) / self._roof(m, *shape))
        seconds: Array = self._roof(m, n, k) * np.exp(log_share)
        if self.wider is not None:
            with contextlib.suppress(InputError):  # far from all of its shapes
                seconds = np.minimum(seconds, self.wider.seconds(m, n, k))
        return np.maximum(seconds, n * k * self.element_bytes / self.read_bytes_per_s)

    def left_out_error(self) -> float:
        """Mean relative error at a measured shape that is left out, over 1 to 256 rows.

        It is 20 % for fewer than three shapes, or where none is near another.
        """
        m = np.array([1.0, 16.0, 64.0, 128.0, 256.0])
        errors = []
        for shape in self.shapes:
            rest = {other: curve for other, curve in self.shapes.items() if other != shape}
            if len(rest) < 2:
                return 0.2
            try:
                guess = dataclasses.replace(self, shapes=rest, wider=None).seconds(m, *shape)
            except InputError:
                continue
            errors.append(np.mean(np.abs(np.log(guess / self._measured(m, shape)))))
        return float(np.mean(errors)) if errors else 0.2

    def smallest_s(self) -> float:
        return min(float(np.min(seconds)) for _, seconds in self.shapes.values())

    def outside(self, n: int, k: int) -> str:
        """A text on sizes of (n, k) outside the measured ones; empty where both are inside."""
        parts = []
        for name, value, sizes in zip("nk", (n, k), self._sizes, strict=True):
            if value > sizes[-1]:
                parts.append(f"{name} = {value} above {sizes[-1]}")
            elif value < sizes[0]:
                parts.append(f"{name} = {value} below {sizes[0]}")
        return " and ".join(parts)

    def _measured(self, m: Array, shape: Shape) -> Array:
        grid, seconds = self.shapes[shape]
        inside = np.interp(m, grid, seconds)
        beyond = self._roof(m, *shape) * float(seconds[-1] / self._roof(grid[-1], *shape))
        return np.where(m > grid[-1], beyond, inside)

    def _roof(self, m: ArrayLike, n: int, k: int) -> Array:
        rows = np.asarray(m, dtype=np.float64)
        moved = self.element_bytes * (n * k + rows * (n + k))
        flops = 2.0 * rows * n * k
        return np.maximum(flops / self.peaks.flops_per_s, moved / self.peaks.bytes_per_s)


def _neighbours(
    shapes: Collection[Shape], sizes: tuple[list[int], list[int]], n: int, k: int
) -> list[tuple[Shape, float]]:
    """Measured shapes and weights: the corners of the cell around (n, k), else the nearest."""
    if (n, k) in shapes:
        return [((n, k), 1.0)]
    widest = sizes[0][-1]
    if FARTHEST * widest < n <= WIDEST * widest:
        return _neighbours(shapes, sizes, widest, k)
    corners: dict[Shape, float] = {}
    for near_n, share_n in _bracket(n, sizes[0]):
        for near_k, share_k in _bracket(k, sizes[1]):
            corners[near_n, near_k] = corners.get((near_n, near_k), 0.0) + share_n * share_k
    weighted = [(shape, weight) for shape, weight in corners.items() if weight > 0]
    if all(
        shape in shapes and _distance(shape, (n, k)) <= np.log(FARTHEST) for shape, _ in weighted
    ):
        return weighted
    nearest = sorted(shapes, key=lambda shape: _distance(shape, (n, k)))[:_NEIGHBOURS]
    if _distance(nearest[0], (n, k)) > np.log(FARTHEST):
        raise InputError(
            f"a matrix of n = {n}, k = {k} lies too far from the measured ones"
            f" (nearest: n = {nearest[0][0]}, k = {nearest[0][1]})",
            hint="Measure the target with `rooftree calibrate`",
        )
    weights = np.array([1 / _distance(shape, (n, k)) ** 2 for shape in nearest])
    return list(zip(nearest, (weights / weights.sum()).tolist(), strict=True))


def _bracket(value: int, sizes: list[int]) -> list[tuple[int, float]]:
    if value <= sizes[0]:
        return [(sizes[0], 1.0)]
    if value >= sizes[-1]:
        return [(sizes[-1], 1.0)]
    upper = int(np.searchsorted(sizes, value))
    low, high = sizes[upper - 1], sizes[upper]
    share = float(np.log(value / low) / np.log(high / low))
    return [(low, 1.0 - share), (high, share)]


def _distance(one: Shape, other: Shape) -> float:
    return float(max(abs(np.log(one[0] / other[0])), abs(np.log(one[1] / other[1]))))
