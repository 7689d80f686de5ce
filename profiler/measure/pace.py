"""The machine's pace: how slow it was while each sample was taken.

Other work slows a machine for seconds at a time: longer than one sample, shorter than a sweep.
Points are sampled in mixed order, so the samples taken just before and after belong to other
points. How far those samples lie from the medians of their points gives the pace at that
moment. A sample divided by its pace is the sample of a machine at its typical pace.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

REACH = 3  # neighbouring samples on each side that estimate the pace
ITERATIONS = 3  # point medians and paces are estimated in alternation
MIN_SAMPLES = 3  # a point with fewer has no usable median


def paces(seconds: ArrayLike, points: ArrayLike) -> Array:
    """How slow the machine was at each sample, 1 at its typical pace: [samples].

    seconds  [samples] in the order they were taken
    points   int [samples], the point of each sample

    A sample has no say in its own pace, so that a single outlier remains one.
    """
    seconds, points = np.asarray(seconds, np.float64), np.asarray(points, np.int64)
    pace: Array = np.ones_like(seconds)
    if not len(seconds):
        return pace
    usable = np.bincount(points)[points] >= MIN_SAMPLES
    for _ in range(ITERATIONS):
        deviation = np.log(seconds / _medians(seconds / pace, points)[points])
        neighbours = _neighbours(np.where(usable, deviation, np.nan))
        has_neighbour = ~np.all(np.isnan(neighbours), axis=0)
        pace = np.ones_like(seconds)
        pace[has_neighbour] = np.exp(np.nanmedian(neighbours[:, has_neighbour], axis=0))
        pace /= np.median(pace)
    return pace


def _medians(seconds: Array, points: NDArray[np.int64]) -> Array:
    """The median of each point: [points]."""
    medians = np.ones(int(points.max()) + 1)
    for point in np.unique(points):
        medians[point] = np.median(seconds[points == point])
    return medians


def _neighbours(values: Array) -> Array:
    """Up to `REACH` values before and after each one: [2 REACH, samples], NaN past the ends."""
    padded = np.pad(values, REACH, constant_values=np.nan)
    shifts = [shift for shift in range(2 * REACH + 1) if shift != REACH]
    return np.stack([padded[shift : shift + len(values)] for shift in shifts])
