"""The two-branch calibration: the slower of a memory and a compute line over the roofline."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.errors import InputError
from costmodel.points import Points
from costmodel.roofline import Roofline

Array = NDArray[np.float64]

_STARTS = 12
_ROUNDS = 30


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TwoBranchCalibration:
    """seconds = max(memory slope x bytes side + floor, compute slope x FLOPs side + floor).

    The sides are those of the paper's roofline in seconds; all four coefficients are at least
    0. Standard errors are those of each line over its own points, None where it has none.
    """

    roofline: Roofline
    memory_slope: float
    memory_floor_s: float
    compute_slope: float
    compute_floor_s: float
    standard_errors: tuple[float | None, float | None, float | None, float | None]

    def predict_s(self, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1) -> Array:
        """Seconds in the broadcast shape of the arguments, never below the physical bound."""
        compute_s, memory_s = self.roofline.branches_s(rows, context, batch)
        slower = np.maximum(
            self.memory_slope * memory_s + self.memory_floor_s,
            self.compute_slope * compute_s + self.compute_floor_s,
        )
        return self.roofline.bounded(slower, rows, context, batch)


def fit_two_branch(points: Points, roofline: Roofline) -> TwoBranchCalibration:
    """Least relative squares: assign points to the slower line and fit both, until they agree.

    Started from several splits by the ratio of FLOPs to bytes; the best end is kept. Raises
    InputError for fewer than 4 points.
    """
    if len(points) < 4:
        raise InputError(
            f"a two-branch calibration needs at least 4 points (there are {len(points)})",
            hint="Measure more row counts and contexts",
        )
    paper = roofline.with_count("paper")
    compute_s, memory_s = paper.branches_s(points.rows, points.context, points.batch)
    sides = (memory_s, compute_s)
    ratio = compute_s / memory_s
    ends = [
        _settled(sides, points.seconds, ratio > np.quantile(ratio, share))
        for share in np.linspace(0, 1, _STARTS)
    ]
    _, lines, computing = min(ends, key=lambda end: end[0])
    return TwoBranchCalibration(
        roofline=paper,
        memory_slope=float(lines[0]),
        memory_floor_s=float(lines[1]),
        compute_slope=float(lines[2]),
        compute_floor_s=float(lines[3]),
        standard_errors=(
            *_errors(sides[0], points.seconds, ~computing, lines[:2]),
            *_errors(sides[1], points.seconds, computing, lines[2:]),
        ),
    )


def _settled(
    sides: tuple[Array, Array], seconds: Array, computing: NDArray[np.bool_]
) -> tuple[float, Array, NDArray[np.bool_]]:
    """Mean relative error, (slope, floor) of both lines, and which points compute decides."""
    for _ in range(_ROUNDS):
        lines = np.concatenate(
            [_line(sides[0], seconds, ~computing), _line(sides[1], seconds, computing)]
        )
        memory_s, compute_s = lines[0] * sides[0] + lines[1], lines[2] * sides[1] + lines[3]
        before, computing = computing, compute_s > memory_s
        if np.array_equal(before, computing):
            break
    error = float(np.mean(np.abs(np.maximum(memory_s, compute_s) / seconds - 1)))
    return error, lines, computing


def _line(side: Array, seconds: Array, mine: NDArray[np.bool_]) -> Array:
    """Non-negative slope and floor over the chosen points; (0, 0) for none."""
    if not mine.any():
        return np.zeros(2)
    design = np.stack([side[mine] / seconds[mine], 1 / seconds[mine]], axis=1)
    ones = np.ones(len(design))
    slope_alone = float(design[:, 0].sum() / (design[:, 0] ** 2).sum())
    floor_alone = float(design[:, 1].sum() / (design[:, 1] ** 2).sum())
    options = [np.array([slope_alone, 0.0]), np.array([0.0, floor_alone])]
    if mine.sum() > 2:
        both = np.linalg.lstsq(design, ones, rcond=None)[0]
        if np.all(both >= 0):
            return np.asarray(both, dtype=np.float64)
    return min(options, key=lambda line: float(np.sum((design @ line - 1) ** 2)))


def _errors(
    side: Array, seconds: Array, mine: NDArray[np.bool_], line: Array
) -> tuple[float | None, float | None]:
    if mine.sum() < 3:
        return None, None
    design = np.stack([side[mine] / seconds[mine], 1 / seconds[mine]], axis=1)
    residual = float(np.sum((design @ line - 1) ** 2)) / (len(design) - 2)
    spread = residual * np.linalg.pinv(design.T @ design)
    return float(np.sqrt(max(spread[0, 0], 0.0))), float(np.sqrt(max(spread[1, 1], 0.0)))
