"""Interpolation of a densely measured profile in rows, context and batch."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.errors import InputError
from costmodel.points import Points
from costmodel.roofline import Roofline
from costmodel.slices import predict_slices
from costmodel.work import WorkModel, fit_work

Array = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SurfaceOptions:
    """How to interpolate; both are chosen by cross-validation.

    rows: between two measured row counts the time rises in proportion to the modelled work
    (`work`) or to the logarithm of the rows (`log`). context: at each row count the measured
    points are kept (`exact`), or their log ratio to the modelled work is smoothed by a robust
    line over the context (`line`) or its median (`mean`), which averages noise away.
    """

    rows: Literal["work", "log"] = "work"
    context: Literal["exact", "line", "mean"] = "exact"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Grid:
    """Seconds at one batch: [contexts, rows], both axes ascending."""

    batch: float
    contexts: Array
    rows: Array
    seconds: Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SurfaceCalibration:
    """Predicts between measured points; beyond them the modelled work scales the edge.

    Between two measured row counts the prediction lies between their times, so steps stay
    where they were measured and nothing overshoots. Nothing is faster than the physical
    bound, or than the share of it that the fastest point reaches where peaks are stated too low.
    """

    work: WorkModel
    grids: tuple[Grid, ...]
    options: SurfaceOptions
    bound_share: float  # of the physical bound, below which nothing is predicted

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
        return self._bounded(self._on_grid(edge, rows, context) * scale, rows, context, batch)

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
            return self._bounded(result, rows, context, grid.batch)
        scale = self.work.seconds(rows, context, grid.batch)
        scaled = result * scale / self.work.seconds(inner_rows, inner_context, grid.batch)
        return self._bounded(scaled, rows, context, grid.batch)

    def _bounded(self, seconds: Array, rows: Array, context: float, batch: float) -> Array:
        bound = self.work.roofline.with_count("physical").seconds(rows, context, batch)
        return np.maximum(seconds, self.bound_share * bound)


def build_surface(
    points: Points, roofline: Roofline, options: SurfaceOptions
) -> SurfaceCalibration:
    """A calibration from measured points, without choosing anything; numpy only and quick.

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
    if options.context != "exact":
        log_ratio = _smoothed(log_ratio, contexts, options.context)
    seconds = np.exp(_filled(log_ratio, np.log(rows), contexts)) * base
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
        known = np.isfinite(log_ratio[:, index])
        x, y = contexts[known], log_ratio[known, index]
        slope = 0.0
        if how == "line" and len(x) > 2:
            first, second = np.triu_indices(len(x), 1)
            slope = float(np.median((y[second] - y[first]) / (x[second] - x[first])))
        result[known, index] = slope * x + np.median(y - slope * x)
    return result


def _filled(log_ratio: Array, log_rows: Array, contexts: Array) -> Array:
    """Fill cells that were not measured.

    Between two measured contexts of a row count its own ratio is interpolated. Beyond them
    the other row counts at that context are, and shifted by how far this row count lies from
    such an interpolation where it was measured.
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
    known = np.isfinite(result)
    for index in np.flatnonzero(~known.all(axis=0)).tolist():
        others = known.copy()
        others[:, index] = False
        guess = _across(result, others, log_rows, index)
        own = known[:, index]
        shift = result[:, index] - guess  # NaN where this or every other row count is missing
        usable = np.isfinite(shift)
        if usable.any():
            guess = guess + np.interp(contexts, contexts[usable], shift[usable])
        nearest = np.interp(contexts, contexts[own], result[own, index])
        missing = ~own
        result[missing, index] = np.where(np.isfinite(guess), guess, nearest)[missing]
    return result


def _across(log_ratio: Array, known: NDArray[np.bool_], log_rows: Array, index: int) -> Array:
    """One column interpolated from the known others at each context; NaN where there are none."""
    guess = np.full(len(log_ratio), np.nan)
    for line in np.flatnonzero(known.any(axis=1)):
        here = known[line]
        guess[line] = np.interp(log_rows[index], log_rows[here], log_ratio[line, here])
    return guess


def _without_dips(values: Array, error: Array) -> Array:
    """Remove falls that noise explains; keep real ones.

    The nearest non-decreasing sequence replaces a value where it lies within three standard
    errors of it. More work never takes less time, except where another kernel takes over.
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
