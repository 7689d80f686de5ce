"""The two-branch calibration: the slower of a memory and a compute line over the roofline."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import model_validator

from costmodel.calibration.base import Calibration, RooflineCalibration
from costmodel.calibration.points import Points
from costmodel.errors import InputError
from costmodel.fields import Factor, SecondsOrZero, Statistic
from costmodel.roofline import Roofline

Array = NDArray[np.float64]

_STARTS = 12
_ROUNDS = 30

# The calibration of BASTION's public code (cost_model.py): its grid and its weights.
RELEASED_ROWS = tuple(range(16, 513, 16))
RELEASED_CONTEXTS = (64, 128, 256, 512, 1024, 2048)
RELEASED_SIGMA = 30.0


class TwoBranchCalibration(RooflineCalibration):
    """seconds = max(memory slope x bytes side + floor, compute slope x FLOPs side + floor).

    The two sides are those of the paper's roofline, in seconds. The standard errors (`..._se`)
    are those of each line over its own points, None where these are fewer than 3.
    """

    memory_slope: Factor
    memory_floor_s: SecondsOrZero
    compute_slope: Factor
    compute_floor_s: SecondsOrZero
    memory_slope_se: Statistic | None = None
    memory_floor_se_s: Statistic | None = None
    compute_slope_se: Statistic | None = None
    compute_floor_se_s: Statistic | None = None

    @model_validator(mode="after")
    def _check(self) -> TwoBranchCalibration:
        slopes, floors_s = (
            (self.memory_slope, self.compute_slope),
            (self.memory_floor_s, self.compute_floor_s),
        )
        if not max(*slopes, *floors_s) > 0:
            raise ValueError("at least one of the coefficients must be above 0")
        return self

    @property
    def standard_errors(self) -> tuple[float | None, float | None, float | None, float | None]:
        """Standard errors of memory slope and floor, then of compute slope and floor."""
        return (
            self.memory_slope_se,
            self.memory_floor_se_s,
            self.compute_slope_se,
            self.compute_floor_se_s,
        )

    def over(self, roofline: Roofline) -> TwoBranchCalibration:
        """The same coefficients over the paper's count of this roofline."""
        return super().over(roofline.with_count("paper"))

    def predict_s(self, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1) -> Array:
        """Seconds in the broadcast shape of the arguments, never below the physical bound."""
        compute_s, memory_s = self.roofline.branches_s(rows, context, batch)
        slower = np.maximum(
            self.memory_slope * memory_s + self.memory_floor_s,
            self.compute_slope * compute_s + self.compute_floor_s,
        )
        return self.roofline.bounded(slower, rows, context, batch)


def fit_two_branch(points: Points, roofline: Roofline) -> TwoBranchCalibration:
    """Least relative squares: assign each point to its slower line, fit both lines, repeat.

    The iteration starts from several splits by the ratio of FLOPs to bytes; the result with
    the least error is taken. Raises InputError for fewer than 4 points.
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
    results = [
        _iterate(sides, points.seconds, ratio > np.quantile(ratio, share))
        for share in np.linspace(0, 1, _STARTS)
    ]
    _, lines, computing = min(results, key=lambda result: result[0])
    memory_errors = _standard_errors(memory_s, points.seconds, ~computing, lines[:2])
    compute_errors = _standard_errors(compute_s, points.seconds, computing, lines[2:])
    calibration = TwoBranchCalibration(
        memory_slope=float(lines[0]),
        memory_floor_s=float(lines[1]),
        compute_slope=float(lines[2]),
        compute_floor_s=float(lines[3]),
        memory_slope_se=memory_errors[0],
        memory_floor_se_s=memory_errors[1],
        compute_slope_se=compute_errors[0],
        compute_floor_se_s=compute_errors[1],
    )
    return calibration.over(roofline)


def fit_released(forward: Calibration, roofline: Roofline) -> TwoBranchCalibration:
    """Both lines as BASTION's public code fits them, to the forward's times on that code's grid.

    Least squares of seconds from slopes of 1 and floors of 0, all four not negative, with a
    standard deviation that grows 31-fold from the fewest rows to the most.
    """
    from scipy.optimize import curve_fit  # late: reading a profile must not import it

    rows, context = (axis.ravel() for axis in np.meshgrid(RELEASED_ROWS, RELEASED_CONTEXTS))
    compute_s, memory_s = roofline.with_count("paper").branches_s(rows, context)

    def slower(_: Array, memory: float, memory_floor: float, compute: float, floor: float) -> Array:
        fitted: Array = np.maximum(memory * memory_s + memory_floor, compute * compute_s + floor)
        return fitted

    sigma = 1.0 + RELEASED_SIGMA * (rows - rows.min()) / np.ptp(rows)
    lines, _ = curve_fit(
        slower,
        np.arange(len(rows)),
        forward.predict_s(rows, context),
        p0=(1.0, 0.0, 1.0, 0.0),
        bounds=(0.0, np.inf),
        sigma=sigma / sigma.mean(),
        maxfev=5000,
    )
    memory_slope, memory_floor_s, compute_slope, compute_floor_s = (float(line) for line in lines)
    calibration = TwoBranchCalibration(
        memory_slope=memory_slope,
        memory_floor_s=memory_floor_s,
        compute_slope=compute_slope,
        compute_floor_s=compute_floor_s,
    )
    return calibration.over(roofline)


def _iterate(
    sides: tuple[Array, Array], seconds: Array, computing: NDArray[np.bool_]
) -> tuple[float, Array, NDArray[np.bool_]]:
    """Mean relative error, (slope, floor) of both lines, and the points on the compute line."""
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


def _line(side: Array, seconds: Array, chosen: NDArray[np.bool_]) -> Array:
    """Non-negative slope and floor over the chosen points; (0, 0) for none."""
    if not chosen.any():
        return np.zeros(2)
    design = np.stack([side[chosen] / seconds[chosen], 1 / seconds[chosen]], axis=1)
    ones = np.ones(len(design))
    slope_alone = float(design[:, 0].sum() / (design[:, 0] ** 2).sum())
    floor_alone = float(design[:, 1].sum() / (design[:, 1] ** 2).sum())
    options = [np.array([slope_alone, 0.0]), np.array([0.0, floor_alone])]
    if chosen.sum() > 2:
        both = np.linalg.lstsq(design, ones, rcond=None)[0]
        if np.all(both >= 0):
            return np.asarray(both, dtype=np.float64)
    return min(options, key=lambda line: float(np.sum((design @ line - 1) ** 2)))


def _standard_errors(
    side: Array, seconds: Array, chosen: NDArray[np.bool_], line: Array
) -> tuple[float | None, float | None]:
    """Standard errors of slope and floor; None for fewer than 3 points."""
    if chosen.sum() < 3:
        return None, None
    design = np.stack([side[chosen] / seconds[chosen], 1 / seconds[chosen]], axis=1)
    residual = float(np.sum((design @ line - 1) ** 2)) / (len(design) - 2)
    spread = residual * np.linalg.pinv(design.T @ design)
    return float(np.sqrt(max(spread[0, 0], 0.0))), float(np.sqrt(max(spread[1, 1], 0.0)))
