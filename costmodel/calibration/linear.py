"""The paper's calibration: one slope and one intercept over its roofline."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from costmodel.calibration.points import Points, RooflineCalibration
from costmodel.errors import InputError
from costmodel.fields import Factor, SignedSeconds, Statistic
from costmodel.roofline import Roofline
from costmodel.statistics import Array


class LinearCalibration(RooflineCalibration):
    """seconds = slope x paper roofline + intercept (paper, section 2.4 and appendix H.4).

    RMSE and MAPE (a fraction) are those of the fitted points: before, of the bare roofline;
    after, of the line. Standard errors are those of least squares.
    """

    slope: Factor
    intercept_s: SignedSeconds
    slope_se: Statistic
    intercept_se_s: Statistic
    rmse_before_s: Statistic
    rmse_after_s: Statistic
    mape_before: Statistic
    mape_after: Statistic

    def over(self, roofline: Roofline) -> LinearCalibration:
        """The same coefficients over the paper's count of this roofline."""
        return super().over(roofline.with_count("paper"))

    def predict_s(self, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1) -> Array:
        """Seconds in the broadcast shape of the arguments, never below the physical bound.

        The bound matters far outside the fitted points, where a negative intercept is impossible.
        """
        roofline = self.roofline
        line: Array = self.slope * roofline.seconds(rows, context, batch) + self.intercept_s
        if self.slope >= 1 and self.intercept_s >= 0 and not roofline.architecture.experts:
            return line  # without experts the paper's count is never below the physical one
        return roofline.bounded(line, rows, context, batch)


def fit_linear(points: Points, roofline: Roofline) -> LinearCalibration:
    """Least squares of seconds over the paper's roofline, as the paper does.

    A falling line is noise on a flat cost: its slope becomes 0 and its intercept the mean. Raises
    InputError for fewer than 3 points or points of one roofline time only.
    """
    if len(points) < 3:
        raise InputError(
            f"a linear calibration needs at least 3 points (there are {len(points)})",
            hint="Measure more row counts and contexts",
        )
    x = roofline.with_count("paper").seconds(points.rows, points.context, points.batch)
    y = points.seconds
    if np.ptp(x) <= 1e-9 * np.max(x):
        raise InputError(
            "all points have the same roofline time, so no slope can be fitted",
            hint="Measure several row counts and contexts",
        )
    mean_x, spread = np.mean(x), np.sum((x - np.mean(x)) ** 2)
    slope = max(float(np.sum((x - mean_x) * (y - np.mean(y))) / spread), 0.0)
    intercept = float(np.mean(y) - slope * mean_x)
    fitted = slope * x + intercept
    variance = np.sum((y - slope * x - intercept) ** 2) / (len(x) - 2)
    calibration = LinearCalibration(
        slope=slope,
        intercept_s=intercept,
        slope_se=float(np.sqrt(variance / spread)),
        intercept_se_s=float(np.sqrt(variance * (1 / len(x) + mean_x**2 / spread))),
        rmse_before_s=float(np.sqrt(np.mean((x - y) ** 2))),
        rmse_after_s=float(np.sqrt(np.mean((fitted - y) ** 2))),
        mape_before=float(np.mean(np.abs(x - y) / y)),
        mape_after=float(np.mean(np.abs(fitted - y) / y)),
    )
    return calibration.over(roofline)
