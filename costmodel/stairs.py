"""The physical calibration times a learnt correction: stairs in rows, smooth in context."""

from __future__ import annotations

import dataclasses
from itertools import product

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.errors import InputError
from costmodel.physical import PhysicalCalibration
from costmodel.points import Points
from costmodel.slices import predict_slices
from costmodel.stairs_kernel import LEVEL, Parts, Places, Scales, over_context, over_rows

Array = NDArray[np.float64]

MIN_POINTS = 6
_STEPS = (0.01, 0.03, 0.1)
_TILES = (0.002, 0.01, 0.03)
_CONTEXTS = (0.1, 0.3)
_NOISES = (0.001, 0.003, 0.01, 0.03)
# Medians of forwards repeat within some 0.3 %, give or take a factor of 2 (one deviation).
_USUAL_NOISE, _NOISE_FACTOR = 0.003, 0.7
_FAR_OFF = 6.0  # standard deviations beyond which a point contradicts the others
_LAST_TABLE_ROW = 8192
_KEPT_SLICES = 512


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StairsCalibration:
    """log seconds = log physical + Gaussian process conditioned on the measured points.

    Between two measured row counts a prediction does not fall and lies between theirs, so
    nothing overshoots; falls stay where they were measured. Row counts are whole numbers;
    between them the time is interpolated; more than were measured take
    `PhysicalCalibration.beyond_s`. Nothing is faster than the physical bound, or than the
    share of it that the fastest point reaches where peaks are stated too low.
    """

    physical: PhysicalCalibration
    scales: Scales
    points: Points
    places: Places
    weights: Array  # covariance of the points, inverted, times their log ratios
    left_out: NDArray[np.bool_]  # points that others contradict
    bound_share: float  # of the physical bound, below which nothing is predicted
    _tables: dict[float, _Table] = dataclasses.field(default_factory=dict, repr=False)

    def predict_s(self, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1) -> Array:
        """Seconds in the broadcast shape of the arguments."""
        return predict_slices(self._slice, rows, context, batch)

    def _slice(self, rows: Array, context: float, batch: float) -> Array:
        """Seconds of any rows at one context and batch."""
        table = self._tables.get(batch)
        if table is None:
            table = self._tables[batch] = _Table.of(self, batch)
        seconds = table.seconds(context)
        index = np.minimum(rows, table.rows[-1]).astype(np.intp)
        known: Array = seconds[index - 1]
        if np.all(index == rows):
            return known
        known = np.interp(rows, table.rows, seconds)
        beyond = rows > table.rows[-1]
        if np.any(beyond):
            last = (float(table.rows[-1]), float(seconds[-1]))
            more = np.maximum(self.physical.beyond_s(rows, last, context, batch), seconds[-1])
            bound = self.bound_share * self.physical.bound_s(rows, context, batch)
            known = np.where(beyond, np.maximum(more, bound), known)
        return np.asarray(known, dtype=np.float64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Table:
    """What does not depend on the context, for every whole row count up to the most measured."""

    calibration: StairsCalibration
    batch: float
    rows: Array  # [r] 1, 2, ...
    fixed: Array  # [r] correction by steps and tiles
    alike: Array  # [r, m] the rows' part of the context term, by measured token count
    which: NDArray[np.intp]  # [n] the token count of each point
    base: Array  # [r] physical seconds at no context
    slope: Array  # [r] physical seconds a cached token
    bound: tuple[Array, Array]  # [2, r] both sides of the bound at no context, and a token more
    below: NDArray[np.intp]  # [r] the measured row counts around each
    above: NDArray[np.intp]
    interval: Array
    kept: dict[float, Array]

    @classmethod
    def of(cls, calibration: StairsCalibration, batch: float) -> _Table:
        measured = np.unique(calibration.points.rows)
        last = min(np.ceil(measured[-1]), _LAST_TABLE_ROW)
        rows = np.arange(1.0, last + 1.0)
        physical = calibration.physical
        here = Places(
            tokens=rows * batch,
            many=rows > 1,
            context=np.zeros_like(rows),
            share=np.ones_like(rows),
        )
        measured_places, which = calibration.places.by_rows()
        steps, tiles, alike = over_rows(here, measured_places)
        scales, known = calibration.scales, np.bincount(which, calibration.weights)
        base = physical.fitted_s(rows, 0.0, batch)
        bounds = [np.stack(physical.bounds_s(rows, cached, batch)) for cached in (0.0, 1.0)]
        knots = measured[measured <= last].astype(np.intp)
        position = np.searchsorted(knots, rows)
        return cls(
            calibration=calibration,
            batch=batch,
            rows=rows,
            fixed=(LEVEL**2 + scales.step**2 * steps + scales.tile**2 * tiles) @ known,
            alike=scales.context**2 * alike,
            which=which,
            base=base,
            slope=physical.fitted_s(rows, 1.0, batch) - base,
            bound=(bounds[0], bounds[1] - bounds[0]),
            below=knots[np.maximum(position - 1, 0)] - 1,
            above=knots[np.minimum(position, len(knots) - 1)] - 1,
            interval=position.astype(np.float64),
            kept={},
        )

    def seconds(self, context: float) -> Array:
        """[r] Seconds at one context; kept, as many calls share one."""
        found = self.kept.get(context)
        if found is not None:
            return found
        physical, places = self.calibration.physical, self.calibration.places
        cached = physical.cached(context)
        spent = self.slope * cached
        total = self.base + spent
        near = over_context(context, places.context)[0] * places.share * self.calibration.weights
        by_context = self.alike @ np.bincount(self.which, near)
        correction = self.fixed + spent / total * by_context
        seconds = self._in_order(total * np.exp(correction))
        seconds = np.maximum(seconds, self.calibration.bound_share * self._bound_s(context))
        if len(self.kept) >= _KEPT_SLICES:
            self.kept.clear()
        self.kept[context] = seconds
        return seconds

    def _bound_s(self, context: float) -> Array:
        """[r] The physical bound; a window makes it bend with the context, so look it up."""
        physical = self.calibration.physical
        if physical.roofline.architecture.sliding_window is not None:
            return physical.bound_s(self.rows, context, self.batch)
        none, one_more = self.bound
        bound: Array = np.max(none + one_more * context, axis=0)
        return bound

    def _in_order(self, seconds: Array) -> Array:
        """Between two measured row counts: within their times and never falling."""
        one, other = seconds[self.below], seconds[self.above]
        inner = (self.below < np.arange(len(seconds))) & (np.arange(len(seconds)) < self.above)
        low, high = np.minimum(one, other), np.maximum(one, other)
        within = np.where(inner, np.clip(seconds, low, high), seconds)
        # Each interval is lifted above the one before, so that one running maximum serves all.
        lift = 2.0 * float(np.max(within)) * self.interval
        rising = np.maximum.accumulate(within + lift) - lift
        return np.where(inner, np.minimum(rising, high), within)


def build_stairs(
    points: Points, physical: PhysicalCalibration, scales: Scales
) -> StairsCalibration:
    """Condition on the points under given scales; numpy only and quick.

    A point that several others of its tile contradict beyond six standard deviations counts
    for nothing; a lone one cannot be told from a step and stays. Raises InputError for fewer
    than 6 points.
    """
    return _conditioned(points, physical, scales, *_prepared(points, physical))


def fit_stairs(points: Points, physical: PhysicalCalibration) -> StairsCalibration:
    """Choose the scales by marginal likelihood and condition on the points.

    Noise has a prior around 0.3 %. Scales under which the cost of a measured row count would
    fall with the context, where no point falls, are passed over. Raises InputError for fewer
    than 6 points.
    """
    places, ratio, parts = _prepared(points, physical)
    ranked = _ranked(points.median_error**2, ratio, parts)
    wild = _conditioned(points, physical, ranked[0], places, ratio, parts).left_out
    if wild.any():
        ranked = _ranked(points.median_error**2 + wild, ratio, parts)
    for scales in ranked[:6]:
        fitted = _conditioned(points, physical, scales, places, ratio, parts)
        if not _falls_with_context(fitted):
            return fitted
    calm = dataclasses.replace(ranked[0], context=0.0)
    return _conditioned(points, physical, calm, places, ratio, parts)


def places_of(physical: PhysicalCalibration, rows: Array, context: Array, batch: Array) -> Places:
    """Shapes as the covariance sees them."""
    return Places(
        tokens=rows * batch,
        many=rows > 1,
        context=context,
        share=physical.attention_share(rows, context, batch),
    )


def _prepared(points: Points, physical: PhysicalCalibration) -> tuple[Places, Array, Parts]:
    if len(points) < MIN_POINTS:
        raise InputError(
            f"a stairs calibration needs at least {MIN_POINTS} points (there are {len(points)})",
            hint="Measure more row counts and contexts",
        )
    places = places_of(physical, points.rows, points.context, points.batch)
    predicted = physical.fitted_s(points.rows, points.context, points.batch)
    return places, np.log(points.seconds / predicted), Parts.of(places, places)


def _bound_share(points: Points, physical: PhysicalCalibration) -> float:
    bound = physical.bound_s(points.rows, points.context, points.batch)
    return min(1.0, float(np.min(points.seconds / bound)))


def _ranked(variance: Array, ratio: Array, parts: Parts) -> list[Scales]:
    """All scales, the likeliest first; `variance` of each point comes on top of the noise."""
    choices = [
        Scales(step=step, tile=tile, context=context, noise=noise)
        for step, tile, context, noise in product(_STEPS, _TILES, _CONTEXTS, _NOISES)
    ]
    return sorted(choices, key=lambda scales: _unlikeliness(variance, scales, ratio, parts))


def _unlikeliness(variance: Array, scales: Scales, ratio: Array, parts: Parts) -> float:
    """Minus the log likelihood of the ratios, less the log prior of the noise."""
    total = parts.covariance(scales) + np.diag(scales.noise**2 + variance)
    lower = np.linalg.cholesky(total)
    white = np.linalg.solve(lower, ratio)
    away = np.log(scales.noise / _USUAL_NOISE) / _NOISE_FACTOR
    return float(0.5 * white @ white + np.sum(np.log(np.diag(lower))) + 0.5 * away**2)


def _conditioned(
    points: Points,
    physical: PhysicalCalibration,
    scales: Scales,
    places: Places,
    ratio: Array,
    parts: Parts,
) -> StairsCalibration:
    covariance = parts.covariance(scales)
    variance = scales.noise**2 + points.median_error**2
    inverse = _inverse(covariance, variance)
    wild = _contradicted(inverse, ratio, places)
    if wild.any():
        variance = np.where(wild, 1.0, variance)
        inverse = _inverse(covariance, variance)
    return StairsCalibration(
        physical=physical,
        scales=scales,
        points=points,
        places=places,
        weights=inverse @ ratio,
        left_out=wild,
        bound_share=_bound_share(points.take(~wild), physical),
    )


def _inverse(covariance: Array, variance: Array) -> Array:
    return np.asarray(np.linalg.inv(covariance + np.diag(variance)), dtype=np.float64)


def _contradicted(inverse: Array, ratio: Array, places: Places) -> NDArray[np.bool_]:
    """Points far from what the others predict, with three others or more in their tile of 16.

    The left-out residual of a Gaussian process is [inverse ratio]_i / inverse_ii.
    """
    residual = np.abs(inverse @ ratio) / np.sqrt(np.diag(inverse))
    tile = np.where(places.tokens > 1, np.ceil(places.tokens / 16), 0.0)
    wild = np.zeros(len(ratio), dtype=bool)
    for index in np.flatnonzero(residual > _FAR_OFF):
        alike = ratio[tile == tile[index]]
        centre = np.median(alike)
        spread = 1.4826 * np.median(np.abs(alike - centre))
        wild[index] = len(alike) > 3 and abs(ratio[index] - centre) > 5 * spread + 0.02
    return wild


def _falls_with_context(fitted: StairsCalibration) -> bool:
    """Whether a measured row count gets cheaper with the context where no point does."""
    points = fitted.points
    contexts = np.geomspace(max(points.context.min(), 1.0), max(points.context.max(), 2.0), 9)
    for batch in np.unique(points.batch):
        here = points.take(points.batch == batch)
        rows = np.unique(here.rows)
        curves = np.array([fitted.predict_s(rows, context, batch) for context in contexts])
        falls = np.any(np.diff(np.log(curves), axis=0) < -2 * fitted.scales.noise, axis=0)
        for row in rows[falls]:
            column = here.take(here.rows == row)
            ordered = column.seconds[np.argsort(column.context)]
            if np.all(np.diff(ordered) >= 0):
                return True
    return False
