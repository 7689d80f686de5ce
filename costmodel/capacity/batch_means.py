"""Means and percentiles of a simulated series with confidence intervals (batch means).

One long run is cut into consecutive batches. A statistic of one batch hardly depends on that of
another when a batch is much longer than the queue's memory, so the spread over batches gives an
interval by Student's t (A. M. Law, Simulation Modeling and Analysis, chapter 9).
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import t as student

from costmodel.errors import InputError

Array = NDArray[np.float64]

BATCHES = 20
CONFIDENCE = 0.95
# Fewer values in a batch say too little about its percentiles.
LEAST_IN_BATCH = 10


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A statistic of all values, and its 95 % interval; NaN bounds where values are too few."""

    value: float
    low: float
    high: float


def mean_estimate(values: ArrayLike) -> Estimate:
    """The mean of a series [values] in its order. Raises InputError for an empty one."""
    return _estimate(values, None)


def percentile_estimate(values: ArrayLike, percent: float) -> Estimate:
    """A percentile of a series [values] in its order. Raises InputError."""
    if not 0 <= percent <= 100:
        raise InputError(f"a percentile must be from 0 to 100 (is {percent!r})")
    return _estimate(values, percent)


def _estimate(values: ArrayLike, percent: float | None) -> Estimate:
    series = np.asarray(values, dtype=np.float64)
    if series.ndim != 1 or not len(series):
        raise InputError("there are no values to take a statistic of")
    whole = _statistic(series[None, :], percent)[0]
    size = len(series) // BATCHES
    if size < LEAST_IN_BATCH:
        return Estimate(value=float(whole), low=math.nan, high=math.nan)
    # What does not fill a batch is left out at the front, where a run is farthest from steady.
    batches = series[len(series) - size * BATCHES :].reshape(BATCHES, size)
    spread = np.std(_statistic(batches, percent), ddof=1) / math.sqrt(BATCHES)
    reach = float(student.ppf((1 + CONFIDENCE) / 2, BATCHES - 1) * spread)
    return Estimate(value=float(whole), low=float(whole) - reach, high=float(whole) + reach)


def _statistic(batches: Array, percent: float | None) -> Array:
    """Of each row of [batches, values]."""
    found = np.mean(batches, axis=1) if percent is None else np.percentile(batches, percent, axis=1)
    return np.asarray(found, dtype=np.float64)
