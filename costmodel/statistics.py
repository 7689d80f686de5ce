"""Array types, robust statistics of timing samples, and non-negative least squares.

Times are in seconds. A statistic of too few samples is None, never zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from statistics import fmean, median

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# Standard deviation of a normal distribution over its MAD (1 / 0.6745).
MAD_TO_SIGMA = 1.4826
# Standard error of the median of n normal samples over sigma / sqrt(n): sqrt(pi / 2).
MEDIAN_EFFICIENCY = 1.2533

MIN_FOR_MAD = 3
LEAST_TO_TRIM = 8


def mad_s(seconds: Sequence[float]) -> float | None:
    """Median absolute deviation from the median; None with fewer than three samples."""
    if len(seconds) < MIN_FOR_MAD:
        return None
    centre_s = median(seconds)
    return median([abs(value - centre_s) for value in seconds])


def typical(values: Sequence[float]) -> float:
    """The mean of the middle three quarters of eight values or more; the median of fewer.

    Other work slows a short call in few of its samples by much, and a long call in all by little.
    Their means rise by the same share, their medians do not.
    """
    count = len(values)
    if count < LEAST_TO_TRIM:
        return median(values)
    return fmean(sorted(values)[count // 8 : count - count // 8])


def robust_sigma(residuals: NDArray[np.float64]) -> float:
    """Standard deviation of residuals around zero, from the median of their absolute values."""
    return float(MAD_TO_SIGMA * np.median(np.abs(residuals)))


def relative_spread(seconds: Sequence[float]) -> float | None:
    """Standard deviation of one sample over the median, estimated from the MAD."""
    deviation_s = mad_s(seconds)
    if deviation_s is None:
        return None
    return MAD_TO_SIGMA * deviation_s / median(seconds)


def relative_error(seconds: Sequence[float]) -> float | None:
    """Standard error of the median over the median, estimated from the MAD."""
    spread = relative_spread(seconds)
    if spread is None:
        return None
    return MEDIAN_EFFICIENCY * spread / math.sqrt(len(seconds))


def extend_linear(axis: ArrayLike, values: ArrayLike, at: ArrayLike) -> Array:
    """Piecewise linear through (axis, values): constant before, the last slope (>= 0) after."""
    x, y = np.asarray(axis, dtype=np.float64), np.asarray(values, dtype=np.float64)
    place = np.asarray(at, dtype=np.float64)
    inside = np.interp(place, x, y)
    if len(x) < 2:
        return np.asarray(inside, dtype=np.float64)
    slope = max(float((y[-1] - y[-2]) / (x[-1] - x[-2])), 0.0)
    return np.asarray(inside + slope * np.maximum(place - x[-1], 0.0), dtype=np.float64)


def non_negative_minima(
    design: Array, weights: Array, prior: Array, penalty: float
) -> tuple[Array, Array]:
    """Non-negative minima of sum w (design x - 1)^2 + penalty |x - prior|^2.

    One problem for each leading index: design [g, n, k]; returns minima [g, k] and losses [g].
    The objective is strictly convex, so its minimum is the best of the non-negative solutions
    over all subsets of terms.
    """
    size = len(prior)
    weighted = design * weights[None, :, None]
    hessian = np.swapaxes(design, 1, 2) @ weighted + penalty * np.eye(size)
    gradient = weighted.sum(axis=1) + penalty * prior
    used = np.array(list(product([False, True], repeat=size)))
    both = used[:, :, None] & used[:, None, :]
    # A part in 1e12 more on the diagonal, so that no rounding makes a system singular.
    diagonal = np.eye(size) * np.einsum("gkk->gk", hessian)[:, None, :]
    systems = np.where(both[None], hessian[:, None] + 1e-12 * diagonal[:, None], np.eye(size))
    wanted = np.where(used[None], gradient[:, None], 0.0)
    solutions = np.linalg.solve(systems, wanted[..., None])[..., 0]
    gain = np.sum(solutions * wanted, axis=2)
    value = np.where(np.all(solutions >= 0, axis=2), -gain, np.inf)
    index = np.argmin(value, axis=1)
    chosen = np.take_along_axis(solutions, index[:, None, None], axis=1)[:, 0]
    return chosen, np.min(value, axis=1)
