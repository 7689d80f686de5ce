"""The stairs calibration: the physical one times a Gaussian process, stepped in rows.

The covariance of two shapes, as variances of log seconds, has five parts:
- a level common to all;
- steps: a random walk over the rows that moves at tile edges, most at the first (`step_mass`),
  so that between two measured row counts the ratio is interpolated and beyond them constant;
- tiles: row counts in one tile of 16, 64 or 128 rows run the same kernels;
- context: the error of attention's share of the time, similar for near row counts and contexts;
- noise: independent at each measured point. Times that were summed from tables are exact: what
  is noise of a measured point is a deviation there that near row counts and contexts share.
"""

from __future__ import annotations

import dataclasses
from itertools import product

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.calibration.physical import PhysicalCalibration
from costmodel.calibration.points import Points
from costmodel.errors import InputError
from costmodel.fields import LogScale, LogScaleOrZero, Section
from costmodel.roofline import cached_tokens
from costmodel.statistics import Array, Bools, robust_sigma

MIN_POINTS = 6
_STEPS = (0.01, 0.03, 0.1)
_TILES = (0.002, 0.01, 0.03)
_CONTEXTS = (0.1, 0.3)
_NOISES = (0.001, 0.003, 0.01, 0.03)
# Medians of forwards repeat within about 0.3 %; one deviation of that is a factor of 2.
_USUAL_NOISE, _NOISE_FACTOR = 0.003, 0.7
_OUTLIER = 6.0  # standard deviations beyond which a point contradicts the others
# Log seconds by which a correction may exceed those at the points; real ones stay far below.
_MARGIN = 1.0
_LAST_TABLE_ROW = 8192
_CACHED_CONTEXTS = 512

LEVEL = 0.02
_STEP_SHARES = {128: 1.0, 64: 0.5, 32: 0.25, 16: 0.15}
_SMOOTH_SHARE = 0.3
_FIRST_ROW = 0.3  # one row and two run different kernels
_TILE_SHARES = {16: 0.2, 64: 0.4, 128: 0.4}
_CONTEXT_SCALE = 1.5  # in ln(context + 64): a factor of 4.5
_CONTEXT_OFFSET = 64.0
_ONE_ROW_CORRELATION = 0.2  # of the attention of one row with that of several
_EULER = 0.5772156649
_LOCAL_SCALE = 3.0  # of deviations of exact points, in ln(context + 64); 1 in ln(rows)
_EXACT_NOISE = 1e-4


class StairsScales(Section):
    """Standard deviations of log seconds, as stored in a profile.

    With the profile's points and its physical calibration they give the whole calibration.
    `exact`: the points have no noise of their own.
    """

    step: LogScale
    tile: LogScale
    context: LogScaleOrZero
    noise: LogScale
    exact: bool = False

    @property
    def white(self) -> float:
        return _EXACT_NOISE if self.exact else self.noise


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CovarianceInputs:
    """Inputs of the covariance, arrays of one length."""

    tokens: Array  # rows x batch
    many: Bools  # whether there is more than one row
    context: Array
    share: Array  # attention's of the time

    def by_rows(self) -> tuple[CovarianceInputs, NDArray[np.intp]]:
        """The distinct token counts, and the index of each place among them.

        Context and share of the result are those of the first place and mean nothing.
        """
        _, first, which = np.unique(
            np.stack([self.tokens, self.many]), axis=1, return_index=True, return_inverse=True
        )
        once = {name: column[first] for name, column in dataclasses.asdict(self).items()}
        return CovarianceInputs(**once), which.ravel()


def step_mass(tokens: ArrayLike) -> Array:
    """Expected number of steps up to a token count, in units of the step after 128.

    The k-th edge of a tile has the weight 1 / k, since another tile adds a k-th of the work.
    """
    r = np.asarray(tokens, dtype=np.float64)
    mass = _SMOOTH_SHARE * np.log2(r) + _FIRST_ROW * (r > 1)
    for tile, share in _STEP_SHARES.items():
        edges = np.ceil(r / tile) - 1
        n = np.maximum(edges, 1.0)
        harmonic = np.log(n) + _EULER + 1 / (2 * n) - 1 / (12 * n**2)  # 1 + 1/2 + ... + 1/n
        mass = mass + share * np.where(edges >= 1, harmonic, 0.0)
    return np.asarray(mass, dtype=np.float64)


def over_rows(one: CovarianceInputs, other: CovarianceInputs) -> tuple[Array, Array, Array, Array]:
    """Covariance over rows at unit scale [n, m]: steps, tiles, and those of context and noise."""
    steps = np.minimum(step_mass(one.tokens)[:, None], step_mass(other.tokens)[None, :])
    distance = np.log(one.tokens)[:, None] - np.log(other.tokens)[None, :]
    alike = one.many[:, None] == other.many[None, :]
    context = np.where(alike, 1.0, _ONE_ROW_CORRELATION) * np.exp(-0.5 * distance**2)
    tiles = np.zeros(distance.shape)  # summed weights of the tile sizes in which two share a tile
    for tile, share in _TILE_SHARES.items():
        left, right = (np.where(n > 1, np.ceil(n / tile), 0.0) for n in (one.tokens, other.tokens))
        tiles += share * (left[:, None] == right[None, :])
    return steps, tiles, context, alike * np.exp(-np.abs(distance))


def over_context(one: ArrayLike, other: ArrayLike) -> tuple[Array, Array]:
    """Covariance over contexts at unit scale [n, m]: the context term, and the noise."""
    left, right = (
        np.log(np.atleast_1d(np.asarray(c, dtype=np.float64)) + _CONTEXT_OFFSET)
        for c in (one, other)
    )
    distance = np.abs(left[:, None] - right[None, :])
    return np.exp(-0.5 * (distance / _CONTEXT_SCALE) ** 2), np.exp(-distance / _LOCAL_SCALE)


class CovarianceTerms:
    def __init__(self, one: CovarianceInputs, other: CovarianceInputs) -> None:
        (left, left_of), (right, right_of) = one.by_rows(), other.by_rows()
        cells = np.ix_(left_of, right_of)
        steps, tiles, rows, near_rows = (part[cells] for part in over_rows(left, right))
        context, near_context = over_context(one.context, other.context)
        self.steps, self.tiles, self.local = steps, tiles, near_rows * near_context
        self.context = one.share[:, None] * other.share[None, :] * rows * context

    def covariance(self, scales: StairsScales) -> Array:
        """The covariance [n, m], without what points do not share."""
        total: Array = (
            LEVEL**2
            + scales.step**2 * self.steps
            + scales.tile**2 * self.tiles
            + scales.context**2 * self.context
        )
        return total + scales.noise**2 * self.local if scales.exact else total


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StairsCalibration:
    """log seconds = log physical + Gaussian process conditioned on the measured points.

    Between two measured row counts the prediction never falls and lies between their times,
    so it cannot overshoot; a fall between measured row counts stays. It is computed for whole
    row counts and interpolated between them. More rows than were measured take
    `PhysicalCalibration.beyond_s`. No prediction is faster than `bound_share` of the physical
    bound: 1, or less where a point is faster than the stated peaks allow.
    """

    physical: PhysicalCalibration
    scales: StairsScales
    points: Points
    places: CovarianceInputs
    weights: Array  # inverse covariance of the points times their log ratios
    left_out: Bools  # points that others contradict
    reach: tuple[float, float]  # least and largest correction of log seconds
    bound_share: float
    _tables: dict[float, _Table] = dataclasses.field(default_factory=dict, repr=False)

    def predict_s(self, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1) -> Array:
        """Seconds in the broadcast shape of the arguments, one context and batch at a time."""
        r = np.asarray(rows, dtype=np.float64)
        if np.ndim(context) == 0 and np.ndim(batch) == 0:
            return self._slice(r, float(np.asarray(context)), float(np.asarray(batch)))
        r, c, b = np.broadcast_arrays(r, np.asarray(context, float), np.asarray(batch, float))
        settings = np.stack([c.ravel(), b.ravel()], axis=1)
        pairs, which = np.unique(settings, axis=0, return_inverse=True)
        which, result = which.reshape(r.shape), np.empty(r.shape)
        for index, (one_context, one_batch) in enumerate(pairs.tolist()):
            result[which == index] = self._slice(r[which == index], one_context, one_batch)
        return result

    def _slice(self, rows: Array, context: float, batch: float) -> Array:
        table = self._tables.get(batch)
        if table is None:
            table = self._tables[batch] = _Table(self, batch)
        seconds = table.seconds(context)
        index = np.minimum(rows, table.rows[-1]).astype(np.intp)
        looked_up: Array = seconds[index - 1]
        if np.all(index == rows):
            return looked_up
        result = np.interp(rows, table.rows, seconds)
        beyond = rows > table.rows[-1]
        if np.any(beyond):
            last = (float(table.rows[-1]), float(seconds[-1]))
            more = np.maximum(self.physical.beyond_s(rows, last, context, batch), seconds[-1])
            bound = self.bound_share * self.physical.bound.seconds(rows, context, batch)
            result = np.where(beyond, np.maximum(more, bound), result)
        return np.asarray(result, dtype=np.float64)


class _Table:
    """Everything that does not depend on the context, for each whole row count at one batch.

    The row counts [r] are 1, 2, ... up to the largest measured.
    """

    def __init__(self, calibration: StairsCalibration, batch: float) -> None:
        measured = np.unique(calibration.points.rows)
        last = min(np.ceil(measured[-1]), _LAST_TABLE_ROW)
        rows = np.arange(1.0, last + 1.0)
        physical = calibration.physical
        here = CovarianceInputs(
            tokens=rows * batch,
            many=rows > 1,
            context=np.zeros_like(rows),
            share=np.ones_like(rows),
        )
        measured_places, self.token_index = calibration.places.by_rows()  # of each point [n]
        steps, tiles, rows_part, near_rows = over_rows(here, measured_places)
        scales, weights = calibration.scales, np.bincount(self.token_index, calibration.weights)
        bounds = [np.stack(physical.bound.branches_s(rows, c, batch)) for c in (0.0, 1.0)]
        knots = np.minimum(measured[measured <= max(last, measured[0])], last).astype(np.intp)
        position = np.searchsorted(knots, rows)
        self.calibration, self.batch, self.rows = calibration, batch, rows
        # Correction by steps and tiles [r].
        self.fixed = (LEVEL**2 + scales.step**2 * steps + scales.tile**2 * tiles) @ weights
        # The rows' part of the context term, and that of the deviations of exact points, by
        # measured token count [r, m].
        self.rows_part = scales.context**2 * rows_part
        self.near_rows = scales.noise**2 * near_rows if scales.exact else None
        # Physical seconds [r] at no context, and of these attention of the rows among themselves;
        # and seconds a cached token.
        self.base = physical.fitted_s(rows, 0.0, batch)
        self.own = physical.attention_share(rows, 0.0, batch) * self.base
        self.slope = physical.fitted_s(rows, 1.0, batch) - self.base
        # The two sides of the bound [2, r] at no context, and their rise a token.
        self.bound = bounds[0], bounds[1] - bounds[0]
        # Indices of the measured row count below each and of the one above, or its own [r].
        self.below = knots[np.maximum(position - 1, 0)] - 1
        self.above = knots[np.minimum(position, len(knots) - 1)] - 1
        self.interval = position.astype(np.float64)  # between measured row counts
        self.cache: dict[float, Array] = {}  # seconds [r] by context

    def seconds(self, context: float) -> Array:
        """Seconds [r] at one context; cached, as many calls share a context."""
        cached_s = self.cache.get(context)
        if cached_s is not None:
            return cached_s
        physical, places = self.calibration.physical, self.calibration.places
        cached = float(cached_tokens(physical.roofline.architecture, context))
        spent = self.own + self.slope * cached
        total = self.base + self.slope * cached
        weights = self.calibration.weights
        # Beyond the measured contexts attention stays as far off as at the last one.
        inside = np.clip(context, places.context.min(), places.context.max())
        like, near = (part[0] for part in over_context(inside, places.context))
        by_context = self.rows_part @ np.bincount(self.token_index, like * places.share * weights)
        correction = self.fixed + spent / total * by_context
        if self.near_rows is not None:
            correction = correction + self.near_rows @ np.bincount(self.token_index, near * weights)
        correction = np.clip(correction, *self.calibration.reach)
        bound_s = self.calibration.bound_share * self._bound_s(context)
        if context > places.context.max():  # each further token takes the bound's time at least
            last = float(places.context.max())
            bound_s = np.maximum(
                bound_s, self.seconds(last) + self._bound_s(context) - self._bound_s(last)
            )
        seconds = np.maximum(total * np.exp(correction), bound_s)
        # Kept within the times of the measured row counts around, and never falling between them.
        one, other = seconds[self.below], seconds[self.above]
        inner = (self.below < np.arange(len(seconds))) & (np.arange(len(seconds)) < self.above)
        low, high = np.minimum(one, other), np.maximum(one, other)
        within = np.where(inner, np.clip(seconds, low, high), seconds)
        # Each interval is lifted above the one before, so that one running maximum serves all.
        lift = 2.0 * float(np.max(within)) * self.interval
        rising = np.maximum.accumulate(within + lift) - lift
        seconds = np.where(inner, np.minimum(rising, high), within)
        if len(self.cache) >= _CACHED_CONTEXTS:
            self.cache.clear()
        self.cache[context] = seconds
        return seconds

    def _bound_s(self, context: float) -> Array:
        """The physical bound [r]: linear in the context, except under a sliding window."""
        physical = self.calibration.physical
        if physical.roofline.architecture.sliding_window is not None:
            return physical.bound.seconds(self.rows, context, self.batch)
        none, one_more = self.bound
        return np.asarray(np.max(none + one_more * context, axis=0))


def build_stairs(
    points: Points, physical: PhysicalCalibration, scales: StairsScales
) -> StairsCalibration:
    """Condition on the points under given scales.

    A measured point that several others of its tile contradict by more than six standard
    deviations is left out; a lone one may be a step and stays. Raises InputError for fewer than
    6 points.
    """
    return _conditioned(points, physical, scales, *_prepared(points, physical))


def fit_stairs(
    points: Points, physical: PhysicalCalibration, *, exact: bool = False
) -> StairsCalibration:
    """Choose the scales by marginal likelihood and condition on the points.

    `exact` is for times summed from tables: the calibration then passes through all of them.
    Scales are rejected where a measured row count would get cheaper with the context though its
    points do not. Raises InputError for fewer than 6 points.
    """
    places, ratio, parts = _prepared(points, physical)
    ranked = _ranked(points.median_error**2, ratio, parts, exact)
    if (wild := _conditioned(points, physical, ranked[0], places, ratio, parts).left_out).any():
        ranked = _ranked(points.median_error**2 + wild, ratio, parts, exact)
    for scales in ranked[:6]:
        fitted = _conditioned(points, physical, scales, places, ratio, parts)
        if not _falls_with_context(fitted):
            return fitted
    calm = ranked[0].model_copy(update={"context": 0.0})
    return _conditioned(points, physical, calm, places, ratio, parts)


def places_of(
    physical: PhysicalCalibration, rows: Array, context: Array, batch: Array
) -> CovarianceInputs:
    return CovarianceInputs(
        tokens=rows * batch,
        many=rows > 1,
        context=context,
        share=physical.attention_share(rows, context, batch),
    )


def _prepared(
    points: Points, physical: PhysicalCalibration
) -> tuple[CovarianceInputs, Array, CovarianceTerms]:
    """Places of the points, their log ratios to the physical calibration, their covariance."""
    if len(points) < MIN_POINTS:
        raise InputError(
            f"a stairs calibration needs at least {MIN_POINTS} points (there are {len(points)})",
            hint="Measure more row counts and contexts",
        )
    places = places_of(physical, points.rows, points.context, points.batch)
    predicted = physical.fitted_s(points.rows, points.context, points.batch)
    return places, np.log(points.seconds / predicted), CovarianceTerms(places, places)


def _ranked(
    variance: Array, ratio: Array, parts: CovarianceTerms, exact: bool
) -> list[StairsScales]:
    """All scales, the likeliest first; `variance` [n] of the points adds to the noise."""

    def unlikeliness(scales: StairsScales) -> float:
        """Negative log likelihood of the ratios plus negative log prior of the noise."""
        total = parts.covariance(scales) + np.diag(scales.white**2 + variance)
        lower = np.linalg.cholesky(total)
        white = np.linalg.solve(lower, ratio)
        away = np.log(scales.noise / _USUAL_NOISE) / _NOISE_FACTOR
        return float(0.5 * white @ white + np.sum(np.log(np.diag(lower))) + 0.5 * away**2)

    choices = [
        StairsScales(step=step, tile=tile, context=context, noise=noise, exact=exact)
        for step, tile, context, noise in product(_STEPS, _TILES, _CONTEXTS, _NOISES)
    ]
    return sorted(choices, key=unlikeliness)


def _conditioned(
    points: Points,
    physical: PhysicalCalibration,
    scales: StairsScales,
    places: CovarianceInputs,
    ratio: Array,
    parts: CovarianceTerms,
) -> StairsCalibration:
    """The calibration, after leaving out points that others contradict.

    Those are far from the prediction of the others, where three others share their tile. The
    left-out residual of a Gaussian process is [inverse ratio]_i / inverse_ii.
    """
    variance = scales.white**2 + points.median_error**2
    covariance = parts.covariance(scales)
    wild = np.zeros(len(ratio), dtype=bool)
    if not scales.exact:
        inverse = np.linalg.inv(covariance + np.diag(variance))
        residual = np.abs(inverse @ ratio) / np.sqrt(np.diag(inverse))
        tile = np.where(places.tokens > 1, np.ceil(places.tokens / 16), 0.0)
        for index in np.flatnonzero(residual > _OUTLIER):
            alike = ratio[tile == tile[index]]
            centre = np.median(alike)
            spread = robust_sigma(alike - centre)
            wild[index] = len(alike) > 3 and abs(ratio[index] - centre) > 5 * spread + 0.02
        variance = np.where(wild, 1.0, variance)
    weights = np.linalg.solve(covariance + np.diag(variance), ratio)
    bound_s = physical.bound.seconds(points.rows, points.context, points.batch)
    return StairsCalibration(
        physical=physical,
        scales=scales,
        points=points,
        places=places,
        weights=np.asarray(weights, dtype=np.float64),
        left_out=wild,
        reach=(float(ratio.min()) - _MARGIN, float(ratio.max()) + _MARGIN),
        bound_share=min(1.0, float(np.min((points.seconds / bound_s)[~wild]))),
    )


def _falls_with_context(fitted: StairsCalibration) -> bool:
    """Whether a measured row count gets cheaper with the context though its points do not."""
    points = fitted.points
    contexts = np.geomspace(max(points.context.min(), 1.0), max(points.context.max(), 2.0), 9)
    for batch in np.unique(points.batch):
        here = points.take(points.batch == batch)
        rows = np.unique(here.rows)
        curves = np.array([fitted.predict_s(rows, context, batch) for context in contexts])
        falls = np.any(np.diff(np.log(curves), axis=0) < -2 * fitted.scales.noise, axis=0)
        for row in rows[falls]:
            column = here.take(here.rows == row).sorted()
            if np.all(np.diff(column.seconds) >= 0):
                return True
    return False
