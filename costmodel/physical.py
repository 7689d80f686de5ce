"""A forward's time as a small sum of physical work with non-negative, uncertain coefficients."""

from __future__ import annotations

import dataclasses
from itertools import product

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.errors import InputError
from costmodel.points import Points
from costmodel.roofline import Roofline, paper_bytes
from costmodel.work import work_terms

Array = NDArray[np.float64]

COEFFICIENTS = ("floor", "weights", "matrix_flops", "kv_read", "attention_flops", "activations")
TILES = (1, 16, 32, 64, 128, 256)
# A coefficient one prior size away from its prior costs as much as a misfit of 0.1 % at every
# point: it settles what the points leave open and biases nothing that they show.
_PRIOR_WEIGHT = 0.001**2
_RATIOS = np.geomspace(0.3, 8.0, 16)
_USUAL_TILE = 128
_TUKEY = 4.685  # 95 % efficient under normal noise; what lies beyond counts nothing


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PhysicalCalibration:
    """seconds = floor + max(weights, matrix FLOPs) + KV reads + attention FLOPs + activations.

    Each term is a coefficient times the seconds of that work at the peaks; the floor's unit
    is the time to read the weights once. Matrix FLOPs count rows in whole tiles of
    `tile_rows`; attention of more than one row costs at least what `attention_rows` rows do,
    which is how many fill the device. `standard_errors` are None for what the points cannot
    tell. `noise` is the robust relative spread of the points around the fit.
    """

    roofline: Roofline
    coefficients: tuple[float, ...]
    standard_errors: tuple[float | None, ...]
    tile_rows: int
    attention_rows: int
    noise: float
    points: int

    def predict_s(self, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1) -> Array:
        """Seconds in the broadcast shape of the arguments, never below the physical bound."""
        fitted_s = self.fitted_s(rows, context, batch)
        return self.roofline.bounded(fitted_s, rows, context, batch)

    def fitted_s(self, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1) -> Array:
        """The sum of the terms alone, which outside the points may fall below the bound."""
        unit = physical_terms(
            self.roofline, rows, context, batch, (self.tile_rows, self.attention_rows)
        )
        floor, weights, matrix, kv, attention, activations = (
            factor * term for factor, term in zip(self.coefficients, unit, strict=True)
        )
        total: Array = floor + np.maximum(weights, matrix) + kv + attention + activations
        return total

    def attention_share(self, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1) -> Array:
        """Share of the time that goes with the context, 0 .. 1."""
        unit = physical_terms(
            self.roofline, rows, context, batch, (self.tile_rows, self.attention_rows)
        )
        spent = self.coefficients[3] * unit[3] + self.coefficients[4] * unit[4]
        share: Array = spent / self.fitted_s(rows, context, batch)
        return share

    def beyond_s(
        self, rows: ArrayLike, last: tuple[float, float], context: float, batch: float
    ) -> Array:
        """Seconds of more rows than were measured; `last` is the most that were, and theirs.

        Where those compute longer than they read, at the peaks, all terms grow as fitted.
        Before that the rise does not tell the cost of FLOPs: activations and attention go on
        growing, and FLOPs, in tiles of 128 rows or more, count once they alone take longer.
        """
        last_rows, last_s = last
        shape = (self.tile_rows, self.attention_rows)
        _, reading_s, computing_s, *_ = physical_terms(
            self.roofline, last_rows, context, batch, shape
        )
        if computing_s >= reading_s:
            last_fitted_s = self.fitted_s(last_rows, context, batch)
            return last_s * self.fitted_s(rows, context, batch) / last_fitted_s
        matrix_s, attention_s, activations_s = self._parts_s(rows, context, batch)
        _, attention_before_s, activations_before_s = self._parts_s(last_rows, context, batch)
        added_s = attention_s - attention_before_s + activations_s - activations_before_s
        grown: Array = np.maximum(last_s + added_s, matrix_s + attention_s)
        return grown

    def _parts_s(self, rows: ArrayLike, context: float, batch: float) -> tuple[Array, Array, Array]:
        """Matrix FLOPs in usual tiles, attention and its traffic, activations."""
        shape = (max(self.tile_rows, _USUAL_TILE), self.attention_rows)
        unit = physical_terms(self.roofline, rows, context, batch, shape)
        _, _, matrix, kv, attention, activations = (
            factor * term for factor, term in zip(self.coefficients, unit, strict=True)
        )
        return matrix, kv + attention, activations

    def bounds_s(
        self, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1
    ) -> tuple[Array, Array]:
        """The two sides of the physical bound: (compute seconds, memory seconds)."""
        return self.roofline.with_count("physical").branches_s(rows, context, batch)

    def bound_s(self, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1) -> Array:
        """The physical bound."""
        return np.maximum(*self.bounds_s(rows, context, batch))

    def cached(self, context: float) -> float:
        """Cached tokens that are attended to: the context, or the sliding window."""
        window = self.roofline.architecture.sliding_window
        return context if window is None else min(context, float(window))

    def intervals(self) -> dict[str, tuple[float, float] | None]:
        """95 % interval of each coefficient; None for what the points cannot tell."""
        free = max(self.points - len(COEFFICIENTS), 1)
        width = 1.96 + (1.96**3 + 1.96) / (4 * free)  # Student's t, first order
        return {
            name: None
            if error is None
            else (max(value - width * error, 0.0), value + width * error)
            for name, value, error in zip(
                COEFFICIENTS, self.coefficients, self.standard_errors, strict=True
            )
        }


def physical_terms(
    roofline: Roofline,
    rows: ArrayLike,
    context: ArrayLike,
    batch: ArrayLike,
    shape: tuple[int, int],
) -> list[Array]:
    """Seconds at the peaks of each of COEFFICIENTS; `shape` is (tile rows, attention rows)."""
    tile_rows, attention_rows = shape
    s, c, b = np.broadcast_arrays(
        *(np.asarray(value, dtype=np.float64) for value in (rows, context, batch))
    )
    floor, weights, matrix, attention, kv = work_terms(roofline, s, c, b)
    tokens = s * b
    matrix = matrix * (np.ceil(tokens / tile_rows) * tile_rows / tokens)
    # One row takes a kernel that splits the keys and costs what reading them costs.
    filled = np.where(s > 1, np.maximum(tokens, attention_rows) / tokens, 0.0)
    moved = paper_bytes(roofline.architecture, s, 0, b, roofline.element_bytes)
    scores = 2.0 * roofline.element_bytes * roofline.architecture.layers * b * s * s
    io = moved.attention_io - scores * roofline.architecture.heads + moved.ffn_io + moved.lm_head_io
    activations = io / (roofline.peaks.bytes_per_s * roofline.tensor_parallel)
    return [floor, weights, matrix, kv, attention * filled, activations]


def fit_physical(points: Points, roofline: Roofline) -> PhysicalCalibration:
    """Least relative squares over tile sizes, attention fill and coefficients, robustly.

    Raises InputError for fewer than 4 points or points of one row count and context only.
    """
    if len(points) < 4:
        raise InputError(
            f"a physical calibration needs at least 4 points (there are {len(points)})",
            hint="Measure more row counts and contexts",
        )
    bound = roofline.with_count("physical").seconds(points.rows, points.context, points.batch)
    factor = float(np.median(points.seconds / bound))
    weights = np.ones(len(points))
    best = _search(points, roofline, factor, weights)
    for _ in range(2):
        weights = _tukey(best.residual, len(points))
        best = _search(points, roofline, factor, weights)
    best, weights = _polish(best, factor, weights)
    spread = _spread(best.residual, len(points))
    return PhysicalCalibration(
        roofline=roofline,
        coefficients=tuple(float(x) for x in best.coefficients),
        standard_errors=_errors(best, weights, factor, spread),
        tile_rows=best.shape[0],
        attention_rows=best.shape[1],
        noise=spread,
        points=len(points),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Fit:
    """One candidate: relative terms [n, 6], its coefficients, and the relative residuals."""

    shape: tuple[int, int]
    terms: Array
    coefficients: Array

    @property
    def residual(self) -> Array:
        difference: Array = _active(self.terms, self.coefficients) @ self.coefficients - 1
        return difference


def _search(points: Points, roofline: Roofline, factor: float, weights: Array) -> _Fit:
    """The best of all tile sizes, attention fills and ratios of FLOPs to weights."""
    prior = np.array([0.0] + [factor] * 4)
    scored: list[tuple[float, _Fit]] = []
    for shape in product(TILES, _attention_rows(roofline)):
        terms = (
            np.stack(
                physical_terms(roofline, points.rows, points.context, points.batch, shape), axis=1
            )
            / points.seconds[:, None]
        )
        matrix = np.maximum(terms[:, 1], _RATIOS[:, None] * terms[:, 2])  # [ratios, n]
        rest = np.broadcast_to(terms[:, [0, 3, 4, 5]], (len(_RATIOS), len(terms), 4))
        design = np.concatenate([rest[:, :, :1], matrix[:, :, None], rest[:, :, 1:]], axis=2)
        solved, loss = _non_negative(design, weights, prior, factor)
        index = int(np.argmin(loss))
        floor, matrix_factor, kv, attention, activations = solved[index]
        full = np.array(
            [floor, matrix_factor, matrix_factor * _RATIOS[index], kv, attention, activations]
        )
        scored.append((float(loss[index]), _Fit(shape=shape, terms=terms, coefficients=full)))
    return min(scored, key=lambda entry: entry[0])[1]


def _attention_rows(roofline: Roofline) -> tuple[int, ...]:
    return (1, 64, 128, 256, 512, 1024)


def _polish(fit: _Fit, factor: float, weights: Array) -> tuple[_Fit, Array]:
    """All six coefficients at once, branches as they come out, until nothing changes."""
    prior = np.array([0.0] + [factor] * 5)
    best = fit
    for _ in range(20):
        design = _active(best.terms, best.coefficients)
        solved = _non_negative(design[None], weights, prior, factor)[0][0]
        change = np.max(np.abs(solved - best.coefficients)) / factor
        best = dataclasses.replace(best, coefficients=solved)
        weights = _tukey(best.residual, len(weights))
        if change < 1e-6:
            break
    return best, weights


def _active(terms: Array, coefficients: Array) -> Array:
    """The terms with only the slower of weights and matrix FLOPs kept at each point."""
    compute = coefficients[2] * terms[:, 2] > coefficients[1] * terms[:, 1]
    design = terms.copy()
    design[compute, 1] = 0.0
    design[~compute, 2] = 0.0
    return design


def _non_negative(design: Array, weights: Array, prior: Array, scale: float) -> tuple[Array, Array]:
    """Non-negative minima of sum w (design x - 1)^2 + penalty, one a leading index.

    Strictly convex: the best of the solutions over every subset of terms that come out
    non-negative. design [g, n, k]; returns [g, k] and the losses [g].
    """
    size = len(prior)
    penalty = _PRIOR_WEIGHT * np.sum(weights) / scale**2
    weighted = design * weights[None, :, None]
    hessian = np.swapaxes(design, 1, 2) @ weighted + penalty * np.eye(size)
    gradient = weighted.sum(axis=1) + penalty * prior
    used = np.array(list(product([False, True], repeat=size)))
    both = used[:, :, None] & used[:, None, :]
    systems = np.where(both[None], hessian[:, None], np.eye(size))
    wanted = np.where(used[None], gradient[:, None], 0.0)
    solutions = np.linalg.solve(systems, wanted[..., None])[..., 0]
    gain = np.sum(solutions * wanted, axis=2)
    value = np.where(np.all(solutions >= 0, axis=2), -gain, np.inf)
    index = np.argmin(value, axis=1)
    chosen = np.take_along_axis(solutions, index[:, None, None], axis=1)[:, 0]
    return chosen, np.min(value, axis=1)


def _spread(residual: Array, count: int) -> float:
    free = max(count - len(COEFFICIENTS), 1)
    return float(1.4826 * np.median(np.abs(residual)) * np.sqrt(count / free)) + 1e-7


def _tukey(residual: Array, count: int) -> Array:
    """Bisquare weights, with a spread that never lets less than half of the points count."""
    scaled = residual / (_TUKEY * _spread(residual, count))
    weights: Array = np.where(np.abs(scaled) < 1, (1 - scaled**2) ** 2, 0.0)
    return np.maximum(weights, 1e-6)


def _errors(fit: _Fit, weights: Array, factor: float, spread: float) -> tuple[float | None, ...]:
    """Standard errors of the coefficients that are free; None where nothing was seen."""
    design = _active(fit.terms, fit.coefficients)
    penalty = _PRIOR_WEIGHT * np.sum(weights) / factor**2
    hessian = design.T @ (design * weights[:, None]) + penalty * np.eye(design.shape[1])
    covariance = np.linalg.inv(hessian) * spread**2
    seen = np.any(design > 0, axis=0)
    return tuple(
        float(np.sqrt(variance)) if known else None
        for variance, known in zip(np.diag(covariance), seen, strict=True)
    )
