"""Experimental design: the shapes to measure next, for the least expected error."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from costmodel.calibration.physical import fit_physical
from costmodel.calibration.points import Points
from costmodel.calibration.stairs import (
    CovarianceTerms,
    StairsCalibration,
    fit_stairs,
    places_of,
    step_mass,
)
from costmodel.errors import InputError
from costmodel.roofline import Roofline
from costmodel.statistics import Array

Indices = NDArray[np.intp]

FIRST_POINTS = 6  # before anything is fitted
_CONTEXT_WEIGHT = 0.6  # of the range of contexts, relative to that of rows, in first points
_REPEATED_ROW = 0.5  # factor on the distance of a row count that was chosen already
_MOST_EVALUATED = 800
_LEAST_STEP = 0.03  # scale of steps that are expected though few points show none
_STEP_WEIGHT = 2.0


def quick_fit(points: Points, roofline: Roofline) -> StairsCalibration | None:
    """The stairs calibration; None of too few points, or of times that no sum of work fits."""
    try:
        return fit_stairs(points, fit_physical(points, roofline))
    except InputError:
        return None


class PointDesign:
    """Sequential design: chooses shapes in rounds, from the times measured so far.

        design = PointDesign(Points(rows=..., context=..., seconds=nan), roofline)
        chosen = design.first(6)
        ... measure them, then while the held-out error is too large:
        chosen = design.next(points, 4)

    Both return indices into the candidates, whose seconds are not looked at. `first` fills the
    space: the plain step (fewest rows) at the shortest and longest context, then each time the
    candidate farthest from all chosen, in rows (logarithm and expected steps) and the logarithm of
    the context.

    `next` fits the stairs calibration and takes the candidate that lowers the expected squared
    error over all candidates most; every row count has the same weight. The error has two
    parts: the variance of the Gaussian process, and steps whose place between two measured row
    counts is unknown. Where the correction changes by J between two neighbouring measured row
    counts, one step in between has the variance J^2 u (1 - u) at a row count that has the
    share u of the expected steps before it.
    """

    def __init__(self, candidates: Points, roofline: Roofline) -> None:
        self.candidates = candidates
        self.roofline = roofline
        # [n, 2] rows (logarithm and expected steps) and logarithm of context, each 0 .. 1.
        tokens = candidates.rows * candidates.batch
        rows = 0.7 * _unit(step_mass(tokens)) + 0.3 * _unit(np.log(tokens))
        contexts = _CONTEXT_WEIGHT * _unit(np.log(candidates.context + 64.0))
        self._place = np.stack([rows, contexts], axis=1)
        _, inverse, counts = np.unique(candidates.rows, return_inverse=True, return_counts=True)
        self._weight: Array = 1.0 / counts[inverse]

    def first(self, n: int) -> Indices:
        """Indices of up to `n` candidates that fill the space."""
        return self._fill([], n)

    def next(self, points: Points, n: int) -> Indices:
        """Indices of up to `n` further candidates, given the measured points."""
        c = self.candidates
        known = set(zip(points.rows, points.context, points.batch, strict=True))
        shapes = zip(c.rows, c.context, c.batch, strict=True)
        taken = np.array([shape in known for shape in shapes])
        fitted = quick_fit(points, self.roofline)
        if fitted is None or len(np.unique(points.rows)) < 2:
            return self._fill(np.flatnonzero(taken).tolist(), n)
        step_gain = self._step_gain(points, fitted)
        # The error is summed over all candidates, or over evenly spaced ones of many.
        evaluated = np.lexsort((c.context, c.rows))
        evaluated = evaluated[:: max(int(np.ceil(len(evaluated) / _MOST_EVALUATED)), 1)]
        # The covariance of the candidates' log seconds given the points.
        step = max(fitted.scales.step, _LEAST_STEP)
        scales = fitted.scales.model_copy(update={"step": step})
        here, noise = places_of(fitted.physical, c.rows, c.context, c.batch), scales.white**2
        measured = CovarianceTerms(fitted.places, fitted.places).covariance(scales)
        across = CovarianceTerms(here, fitted.places).covariance(scales)
        solved = np.linalg.solve(measured + np.diag(noise + points.median_error**2), across.T)
        covariance = CovarianceTerms(here, here).covariance(scales) - across @ solved
        chosen: list[int] = []
        for _ in range(min(n, int(np.sum(~taken)))):
            variance = np.diag(covariance) + noise
            gain = self._weight[evaluated] @ covariance[evaluated] ** 2 / variance
            gain = gain * (self._weight.sum() / self._weight[evaluated].sum())
            total = np.where(taken, -1.0, gain + _STEP_WEIGHT * step_gain)
            best = int(np.argmax(total))
            chosen.append(best)
            taken[best] = True
            column = covariance[:, best]
            covariance = covariance - np.outer(column, column) / variance[best]
            step_gain = np.where(np.abs(c.rows - c.rows[best]) < 0.5, 0.0, step_gain)
        return np.array(chosen, dtype=np.intp)

    def _fill(self, taken: list[int], n: int) -> Indices:
        """Indices of up to `n` candidates far from those taken and from each other."""
        c, chosen = self.candidates, list(taken)
        wanted = min(len(taken) + n, len(c))
        plain = np.flatnonzero(c.rows == c.rows.min())
        for end in (plain[np.argmin(c.context[plain])], plain[np.argmax(c.context[plain])]):
            if len(chosen) < wanted and int(end) not in chosen:
                chosen.append(int(end))
        while len(chosen) < wanted:
            apart = self._place[:, None] - self._place[chosen][None]
            distance = np.sqrt(np.min(np.sum(apart**2, axis=2), axis=1))
            distance[np.isin(c.rows, c.rows[chosen])] *= _REPEATED_ROW
            distance[chosen] = -1.0
            chosen.append(int(np.argmax(distance)))
        return np.array(chosen[len(taken) :], dtype=np.intp)

    def _step_gain(self, points: Points, fitted: StairsCalibration) -> Array:
        """Squared error that measuring each candidate's row count removes by locating a step.

        A step in an interval lies before the measured row count with probability u, or after it;
        measuring decreases the sum of u (1 - u) over the interval's row counts.
        """
        c = self.candidates
        rows = np.unique(np.concatenate([c.rows, points.rows]))
        context, batch = float(np.median(c.context)), float(c.batch.min())
        correction = np.log(
            fitted.predict_s(rows, context, batch) / fitted.physical.fitted_s(rows, context, batch)
        )
        gain = np.zeros(len(rows))
        mass = step_mass(rows * batch)
        measured = np.searchsorted(rows, np.unique(points.rows))
        for low, high in pairwise(measured):
            jump = correction[high] - correction[low]
            share = (mass[low + 1 : high] - mass[low]) / (mass[high] - mass[low])
            total = np.sum(share * (1 - share))
            for index, at in enumerate(share):
                before, after = share[:index] / at, (share[index + 1 :] - at) / (1 - at)
                left = at * np.sum(before * (1 - before)) + (1 - at) * np.sum(after * (1 - after))
                gain[low + 1 + index] = jump**2 * (total - left)
        return np.asarray(gain[np.searchsorted(rows, c.rows)], dtype=np.float64)


def _unit(values: Array) -> Array:
    spread = float(np.ptp(values))
    return np.asarray((values - values.min()) / (spread or 1.0))


def design_points(table: Points, roofline: Roofline, n: int) -> Indices:
    """Indices of `n` points of a table, chosen from the times of points chosen before only."""
    design = PointDesign(table, roofline)
    chosen = design.first(min(n, FIRST_POINTS)).tolist()
    while len(chosen) < min(n, len(table)):
        chosen += design.next(table.take(np.array(chosen)), 1).tolist()
    return np.array(chosen, dtype=np.intp)
