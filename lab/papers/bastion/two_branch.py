"""The two-branch calibration: the slower of a memory and a compute line over the roofline."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import model_validator

from costmodel.calibration.base import Calibration, RooflineCalibration
from costmodel.fields import Factor, SecondsOrZero
from costmodel.roofline import Roofline

Array = NDArray[np.float64]

# The calibration of BASTION's public code (cost_model.py): its grid and its weights.
RELEASED_ROWS = tuple(range(16, 513, 16))
RELEASED_CONTEXTS = (64, 128, 256, 512, 1024, 2048)
RELEASED_SIGMA = 30.0


class TwoBranchCalibration(RooflineCalibration):
    """seconds = max(memory slope x bytes side + floor, compute slope x FLOPs side + floor).

    The two sides are those of the paper's roofline, in seconds.
    """

    memory_slope: Factor
    memory_floor_s: SecondsOrZero
    compute_slope: Factor
    compute_floor_s: SecondsOrZero

    @model_validator(mode="after")
    def _check(self) -> TwoBranchCalibration:
        slopes, floors_s = (
            (self.memory_slope, self.compute_slope),
            (self.memory_floor_s, self.compute_floor_s),
        )
        if not max(*slopes, *floors_s) > 0:
            raise ValueError("at least one of the coefficients must be above 0")
        return self

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
