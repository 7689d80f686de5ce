"""The surface calibration: interpolation of measured points in rows, context and batch."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.calibration.base import predict_slices
from costmodel.calibration.physical import WORK_TERMS, work_terms
from costmodel.calibration.points import Points
from costmodel.errors import InputError
from costmodel.fields import Section
from costmodel.roofline import Roofline
from costmodel.statistics import non_negative_minima, robust_sigma

Array = NDArray[np.float64]

_WEIGHTS = WORK_TERMS.index("weights")
# Log seconds by which filled and smoothed cells may exceed the measured ones, relative to the
# modelled work; those of real points stay far below.
_MARGIN = 1.0
# A coefficient that differs from its prior by the prior's size costs as much as a misfit of
# 3 % at every point: it decides only what the points leave open.
_PRIOR_WEIGHT = 0.03**2


class SurfaceOptions(Section):
    """Options of the interpolation, as stored in a profile; cross-validation chooses both.

    rows     between two measured row counts the time rises with the modelled work (`work`)
             or with the logarithm of the rows (`log`)
    context  at each row count the measured points stay as they are (`exact`), or their log
             ratio to the modelled work is smoothed by a robust line over the context (`line`)
             or by its median (`mean`)
    """

    rows: Literal["work", "log"]
    context: Literal["exact", "line", "mean"]


EXACT = SurfaceOptions(rows="work", context="exact")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkModel:
    """seconds = sum over WORK_TERMS of coefficient x seconds of that work at the peaks."""

    roofline: Roofline
    coefficients: tuple[float, ...]

    def seconds(self, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1) -> Array:
        """Seconds in the broadcast shape of the arguments; increasing in rows and context."""
        terms = work_terms(self.roofline, rows, context, batch)
        total = sum(
            factor * term for factor, term in zip(self.coefficients, terms, strict=True) if factor
        )
        return np.asarray(total, dtype=np.float64)


def fit_work(points: Points, roofline: Roofline) -> WorkModel:
    """Non-negative coefficients of least relative error, robust to outliers.

    The prior is one common factor over the physical bound and no floor. It decides only what
    the points leave open, such as the cost of context where they have a single one.
    """
    bound = roofline.with_count("physical").seconds(points.rows, points.context, points.batch)
    factor = float(np.median(points.seconds / bound))
    prior = np.array([0.0] + [factor] * (len(WORK_TERMS) - 1))
    terms = work_terms(roofline, points.rows, points.context, points.batch)
    design = np.stack(terms, axis=1) / points.seconds[:, None]
    weights = np.ones(len(points))
    penalty = _PRIOR_WEIGHT * len(points) / factor**2
    for _ in range(3):
        coefficients = non_negative_minima(design[None], weights, prior, penalty)[0][0]
        residual = np.abs(design @ coefficients - 1)
        limit = 3 * robust_sigma(residual) + 1e-6
        weights = np.minimum(1.0, limit / np.maximum(residual, 1e-12))
    # Outliers can leave only terms that are 0 at some shape, but a time is never 0.
    coefficients[_WEIGHTS] = max(coefficients[_WEIGHTS], 0.05 * factor)
    return WorkModel(roofline=roofline, coefficients=tuple(float(x) for x in coefficients))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Grid:
    """Seconds at one batch: [contexts, rows], both axes ascending."""

    batch: float
    contexts: Array
    rows: Array
    seconds: Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SurfaceCalibration:
    """Interpolates between measured points; beyond them scales the edge by the modelled work.

    Between two measured row counts the prediction lies between their times, so it cannot
    overshoot and steps stay where they were measured. No prediction is faster than
    `bound_share` of the physical bound: 1, or less where a point is faster than the stated
    peaks allow.
    """

    work: WorkModel
    grids: tuple[Grid, ...]
    options: SurfaceOptions
    bound_share: float

    def predict_s(self, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1) -> Array:
        """Seconds in the broadcast shape of the arguments."""
        return predict_slices(self._slice, rows, context, batch)

    def _slice(self, rows: Array, context: float, batch: float) -> Array:
        """Seconds of any rows at one context and batch."""
        batches = [grid.batch for grid in self.grids]
        upper = int(np.searchsorted(batches, batch))
        if upper < len(batches) and batches[upper] == batch:
            return self._on_grid(self.grids[upper], rows, context)
        if 0 < upper < len(batches):
            low, high = self.grids[upper - 1], self.grids[upper]
            share = (batch - low.batch) / (high.batch - low.batch)
            below = self._on_grid(low, rows, context)
            return below + share * (self._on_grid(high, rows, context) - below)
        edge = self.grids[min(upper, len(batches) - 1)]
        scale = self.work.seconds(rows, context, batch)
        scale = scale / self.work.seconds(rows, context, edge.batch)
        return self._raised_to_bound(
            self._on_grid(edge, rows, context) * scale, rows, context, batch
        )

    def _on_grid(self, grid: Grid, rows: Array, context: float) -> Array:
        """Seconds of any rows at one context, at a measured batch."""
        inner_rows = np.clip(rows, grid.rows[0], grid.rows[-1])
        inner_context = min(max(context, grid.contexts[0]), grid.contexts[-1])
        seconds = _between(grid.contexts, grid.seconds, inner_context)
        if self.options.rows == "log":
            result = np.interp(np.log(inner_rows), np.log(grid.rows), seconds)
        else:
            knots = self.work.seconds(grid.rows, inner_context, grid.batch)
            # A tiny slope keeps the axis increasing where no work depends on the rows.
            tilt = 1e-9 * float(knots[-1])
            place = self.work.seconds(inner_rows, inner_context, grid.batch) + tilt * inner_rows
            result = np.interp(place, knots + tilt * grid.rows, seconds)
        if inner_context == context and np.array_equal(inner_rows, rows):
            # The bound is convex, so points above it suffice; not so with experts.
            if not self.work.roofline.architecture.experts:
                return result
            return self._raised_to_bound(result, rows, context, grid.batch)
        scale = self.work.seconds(rows, context, grid.batch)
        scaled = result * scale / self.work.seconds(inner_rows, inner_context, grid.batch)
        return self._raised_to_bound(scaled, rows, context, grid.batch)

    def _raised_to_bound(self, seconds: Array, rows: Array, context: float, batch: float) -> Array:
        bound = self.work.roofline.with_count("physical").seconds(rows, context, batch)
        return np.maximum(seconds, self.bound_share * bound)


def build_surface(
    points: Points, roofline: Roofline, options: SurfaceOptions
) -> SurfaceCalibration:
    """Interpolate measured points with given options; needs numpy alone and is quick.

    Raises InputError for fewer than 4 points or fewer than 2 row counts.
    """
    if len(points) < 4 or len(np.unique(points.rows)) < 2:
        raise InputError(
            "a surface needs at least 4 points and 2 row counts"
            f" (there are {len(points)} and {len(np.unique(points.rows))})",
            hint="Measure more points",
        )
    work = fit_work(points, roofline)
    grids = [
        _grid(points.take(points.batch == batch), work, options)
        for batch in np.unique(points.batch)
    ]
    bound = roofline.with_count("physical").seconds(points.rows, points.context, points.batch)
    share = min(1.0, float(np.min(points.seconds / bound)))
    return SurfaceCalibration(work=work, grids=tuple(grids), options=options, bound_share=share)


def _grid(points: Points, work: WorkModel, options: SurfaceOptions) -> Grid:
    rows, column = np.unique(points.rows, return_inverse=True)
    contexts, line = np.unique(points.context, return_inverse=True)
    batch = float(points.batch[0])
    shape = (len(contexts), len(rows))
    base = work.seconds(rows[None, :], contexts[:, None], batch)
    cells = line * len(rows) + column
    counts = np.bincount(cells, minlength=base.size).reshape(shape)
    with np.errstate(invalid="ignore"):  # 0 / 0 marks a cell that was not measured
        measured = np.bincount(cells, points.seconds, base.size).reshape(shape) / counts
        error = np.bincount(cells, points.median_error, base.size).reshape(shape) / counts
    log_ratio, error = np.log(measured / base), np.nan_to_num(error)
    lowest, highest = np.nanmin(log_ratio) - _MARGIN, np.nanmax(log_ratio) + _MARGIN
    if options.context != "exact":
        log_ratio = _smoothed(log_ratio, contexts, options.context)
    filled = _filled(log_ratio, np.log(rows), contexts)
    seconds = np.exp(np.clip(filled, lowest, highest)) * base
    for index in range(len(rows)):
        seconds[:, index] = _without_dips(seconds[:, index], error[:, index])
    for index in range(len(contexts)):
        seconds[index] = _without_dips(seconds[index], error[index])
    return Grid(batch=batch, contexts=contexts, rows=rows, seconds=seconds)


def _between(axis: Array, values: Array, at: float) -> Array:
    """Linear interpolation of the rows of `values` [len(axis), m] at one place on the axis."""
    if len(axis) == 1:
        first: Array = values[0]
        return first
    upper = min(max(int(np.searchsorted(axis, at)), 1), len(axis) - 1)
    share = (at - axis[upper - 1]) / (axis[upper] - axis[upper - 1])
    between: Array = values[upper - 1] + share * (values[upper] - values[upper - 1])
    return between


def _smoothed(log_ratio: Array, contexts: Array, how: str) -> Array:
    """Each column (row count) over its measured contexts: its median, or a Theil-Sen line."""
    result = log_ratio.copy()
    for index in range(log_ratio.shape[1]):
        measured = np.isfinite(log_ratio[:, index])
        x, y = contexts[measured], log_ratio[measured, index]
        slope = 0.0
        if how == "line" and len(x) > 2:
            first, second = np.triu_indices(len(x), 1)
            slope = float(np.median((y[second] - y[first]) / (x[second] - x[first])))
        result[measured, index] = slope * x + np.median(y - slope * x)
    return result


def _filled(log_ratio: Array, log_rows: Array, contexts: Array) -> Array:
    """Fill cells [contexts, rows] that were not measured.

    Between two measured contexts of a row count its ratio is interpolated over the context.
    Beyond them it is interpolated over the other row counts at that context, and shifted by
    the difference between this row count and such an interpolation where it was measured.
    """
    if np.isfinite(log_ratio).all():
        return log_ratio
    result = log_ratio.copy()
    for index in range(log_ratio.shape[1]):
        places = np.flatnonzero(np.isfinite(log_ratio[:, index]))
        inside = slice(places[0], places[-1] + 1)
        result[inside, index] = np.interp(
            contexts[inside], contexts[places], log_ratio[places, index]
        )
    finite = np.isfinite(result)
    for index in np.flatnonzero(~finite.all(axis=0)).tolist():
        others = finite.copy()
        others[:, index] = False
        guess = _across(result, others, log_rows, index)
        of_row = finite[:, index]
        shift = result[:, index] - guess  # NaN where this or every other row count is missing
        usable = np.isfinite(shift)
        if usable.any():
            guess = guess + np.interp(contexts, contexts[usable], shift[usable])
        nearest = np.interp(contexts, contexts[of_row], result[of_row, index])
        missing = ~of_row
        result[missing, index] = np.where(np.isfinite(guess), guess, nearest)[missing]
    return result


def _across(log_ratio: Array, known: NDArray[np.bool_], log_rows: Array, index: int) -> Array:
    """One column interpolated over the rows from the known cells at each context, else NaN."""
    guess = np.full(len(log_ratio), np.nan)
    for line in np.flatnonzero(known.any(axis=1)):
        here = known[line]
        guess[line] = np.interp(log_rows[index], log_rows[here], log_ratio[line, here])
    return guess


def _without_dips(values: Array, error: Array) -> Array:
    """Remove falls that noise explains, and no others.

    The nearest non-decreasing sequence replaces the values that lie within three standard
    errors of it. Larger falls stay: another kernel may take over there.
    """
    if np.all(np.diff(values) >= 0):
        return values
    rising = _non_decreasing(values)
    return np.where(np.abs(rising - values) <= 3 * error * values, rising, values)


def _non_decreasing(values: Array) -> Array:
    """Least-squares non-decreasing sequence, by pooling adjacent violators."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        mean, size = float(value), 1
        while blocks and blocks[-1][0] > mean:
            before, count = blocks.pop()
            mean = (mean * size + before * count) / (size + count)
            size += count
        blocks.append((mean, size))
    return np.repeat([mean for mean, _ in blocks], [size for _, size in blocks])
