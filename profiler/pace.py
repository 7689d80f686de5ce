"""How slow the machine was while each sample was taken, from the samples beside it.

Other work slows a machine for seconds at a time, which is longer than a sample and shorter
than a sweep. Points are sampled in mixed order, so a sample's neighbours in time are of other
points, and how far they lie from the medians of their points says what the machine's pace was
just then. Divided by it, samples are those of a machine at its typical pace.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

REACH = 3  # samples to each side that say what the pace was
ROUNDS = 3  # medians of points and paces are found by turns
LEAST = 3  # samples of a point whose median says anything


def paces(seconds: ArrayLike, points: ArrayLike) -> Array:
    """How slow the machine was at each sample, 1 at its typical pace: [samples].

    seconds  [samples] in the order they were taken
    points   int [samples], the point of each
    A sample itself has no say in its own pace, so a single wild one stays wild.
    """
    taken, point = np.asarray(seconds, dtype=np.float64), np.asarray(points, dtype=np.int64)
    pace: Array = np.ones_like(taken)
    if not len(taken):
        return pace
    telling = np.bincount(point)[point] >= LEAST
    for _ in range(ROUNDS):
        away = np.log(taken / _medians(taken / pace, point)[point])
        beside = _beside(np.where(telling, away, np.nan))
        known = ~np.all(np.isnan(beside), axis=0)
        pace = np.ones_like(taken)
        pace[known] = np.exp(np.nanmedian(beside[:, known], axis=0))
        pace /= np.median(pace)
    return pace


def _medians(seconds: Array, point: NDArray[np.int64]) -> Array:
    """The median of each point, [points]."""
    found = np.ones(int(point.max()) + 1)
    for number in np.unique(point):
        found[number] = np.median(seconds[point == number])
    return found


def _beside(values: Array) -> Array:
    """What lies up to `REACH` places before and behind each value, NaN past the ends."""
    padded = np.pad(values, REACH, constant_values=np.nan)
    places = [place for place in range(2 * REACH + 1) if place != REACH]
    return np.stack([padded[place : place + len(values)] for place in places])
