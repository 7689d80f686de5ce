"""The physical calibration: a sum of physical work with non-negative coefficients."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import cached_property, lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from pydantic import ValidationError, model_validator

from costmodel.calibration.points import Points, RooflineCalibration
from costmodel.errors import InputError
from costmodel.fields import Count, Factor, Statistic
from costmodel.roofline import (
    Roofline,
    cached_tokens,
    distinct_experts,
    paper_bytes,
    physical_bytes,
    physical_flops,
    state_traffic,
)
from costmodel.statistics import Array, non_negative_minima, robust_sigma

WORK_TERMS = ("floor", "weights", "matrix_flops", "attention_flops", "kv_read")
COEFFICIENTS = ("floor", "weights", "matrix_flops", "kv_read", "attention_flops", "activations")
LEAST_FACTOR = 1e-6  # of the largest coefficient: less would be faster than any device is
TILES = (1, 16, 32, 64, 128, 256)
_ATTENTION_ROWS = (1, 64, 128, 256, 512, 1024)
# Tokens beyond which all-reduces may take another protocol; libraries switch at 32 KB to 8 MB.
_SWITCH_TOKENS = (16, 32, 64, 128, 256, 512)
# Communication is told apart where that removes at least this share of the squared error.
_WORTH_A_TERM = 0.2
# A coefficient that differs from its prior by the prior's size costs as much as a misfit of
# 0.1 % at every point: it decides only what the points leave open.
_PRIOR_WEIGHT = 0.001**2
_RATIOS = np.geomspace(0.3, 8.0, 16)
_USUAL_TILE = 128
_TUKEY = 4.685  # 95 % efficient under normal noise; residuals beyond it have no weight


def work_terms(
    roofline: Roofline, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1
) -> list[Array]:
    """Seconds at the peaks of each of WORK_TERMS; the floor counts as reading the weights once."""
    a = roofline.architecture
    flops_per_s = roofline.peaks.flops_per_s * roofline.tensor_parallel
    bytes_per_s = roofline.peaks.bytes_per_s * roofline.tensor_parallel
    s, c, b = (np.asarray(value, dtype=np.float64) for value in (rows, context, batch))
    tokens = s * b
    (common, expert, whole, kv), (matrix_flops, attention_flops), score_width = _one_row(roofline)
    keys = cached_tokens(a, c, scored=True) + (s + 1) / 2 * score_width
    state = state_traffic(a, s, b, roofline.element_bytes)
    state = state + b * c * a.index_values * roofline.element_bytes
    return [
        np.full_like(tokens * keys, whole / bytes_per_s),
        ((common + expert * distinct_experts(a, tokens)) + 0 * c) / bytes_per_s,
        tokens * (matrix_flops / flops_per_s) + 0 * c,
        tokens * keys * (attention_flops / flops_per_s),
        b * cached_tokens(a, c) * (kv / bytes_per_s) + state / bytes_per_s + 0 * s,
    ]


@lru_cache(maxsize=64)
def _one_row(
    roofline: Roofline,
) -> tuple[tuple[float, float, float, float], tuple[float, float], float]:
    """Physical work of one row on one cached token.

    Bytes of the weights that all tokens share, of one expert's, of all that the row reads, and of
    a cached token; FLOPs of matrices and of attention; the mean score width, 1 of a usual layer.
    """
    a = roofline.architecture
    moved = physical_bytes(a, 1, 1, 1, roofline.element_bytes, roofline.read_bytes)
    flops = physical_flops(a, 1, 0)
    attention = float(flops.scores + flops.values)
    share = a.full_layers / a.attention_layers
    score_width = 1.0 + share * (a.full_score_ratio - 1.0)
    fixed = float(
        moved.embedding_and_lm_head_weights + moved.attention_weights + moved.small_weights
    )
    common, ffn = a.common_ffn / max(a.active_ffn, 1), float(moved.ffn_weights)
    expert = ffn * (1 - common) / max(a.active_experts, 1)
    cached = float(a.attention_layers * a.cached_width * roofline.element_bytes)
    matrix_flops, attention_flops = float(flops.total) - attention, attention / score_width
    weights = (fixed + common * ffn, expert, fixed + ffn, cached)
    return weights, (matrix_flops, attention_flops), score_width


class KernelShape(NamedTuple):
    """The discrete part of a physical calibration.

    Rows of a matrix product's tile, rows of attention that fill the device, and tokens beyond which
    all-reduces take longer (None: not told apart).
    """

    tile_rows: int
    attention_rows: int
    switch_tokens: int | None = None


class PhysicalCalibration(RooflineCalibration):
    """seconds = floor + max(weights, matrix FLOPs) + KV reads + attention FLOPs + activations.

    Each term is a coefficient times the seconds of that work at the peaks; the floor counts
    as reading the weights once. Matrix FLOPs count rows in whole tiles of `tile_rows`.
    Attention of more than one row costs at least as much as attention of `attention_rows`
    rows, the number that fills the device. Under tensor parallelism there is `communication`
    where it explains the points: all-reduces beyond `switch_tokens`, where libraries change the
    protocol, which count as reading the weights once; what smaller messages cost is in `floor` and
    `activations`. A standard error (`..._se`) is None where the points do not determine the
    coefficient. `noise` is the robust relative spread of the `points` points around the fit.
    """

    floor: Factor
    weights: Factor
    matrix_flops: Factor
    kv_read: Factor
    attention_flops: Factor
    activations: Factor
    floor_se: Statistic | None = None
    weights_se: Statistic | None = None
    matrix_flops_se: Statistic | None = None
    kv_read_se: Statistic | None = None
    attention_flops_se: Statistic | None = None
    activations_se: Statistic | None = None
    tile_rows: Count
    attention_rows: Count
    communication: Factor | None = None
    switch_tokens: Count | None = None
    noise: Statistic
    points: Count

    @model_validator(mode="after")
    def _check(self) -> PhysicalCalibration:
        if max(self.floor, self.weights, self.matrix_flops) < LEAST_FACTOR:
            raise ValueError(f"floor, weights or matrix_flops must be at least {LEAST_FACTOR:g}")
        if (self.switch_tokens is None) != (self.communication is None):
            raise ValueError("communication and switch_tokens belong together")
        return self

    @cached_property
    def coefficients(self) -> tuple[float, ...]:
        return tuple(getattr(self, name) for name in COEFFICIENTS)

    def predict_s(self, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1) -> Array:
        """Seconds in the broadcast shape of the arguments, never below the physical bound."""
        fitted_s = self.fitted_s(rows, context, batch)
        return self.roofline.bounded(fitted_s, rows, context, batch)

    def fitted_s(self, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1) -> Array:
        """The sum of the terms alone; outside the points it may lie below the physical bound."""
        floor, weights, matrix, kv, attention, activations = self._terms_s(rows, context, batch)
        total: Array = floor + np.maximum(weights, matrix) + kv + attention + activations
        if self.communication is not None and self.switch_tokens is not None:
            unit_s = communication_term(self.roofline, rows, batch, self.switch_tokens)
            total = total + self.communication * unit_s
        return total

    def attention_share(self, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1) -> Array:
        """Share of the time that attention takes, 0 .. 1: KV reads and attention FLOPs."""
        terms_s = self._terms_s(rows, context, batch)
        return np.asarray((terms_s[3] + terms_s[4]) / self.fitted_s(rows, context, batch))

    def beyond_s(
        self, rows: ArrayLike, last: tuple[float, float], context: float, batch: float
    ) -> Array:
        """Seconds of more rows than were measured; `last` is (most measured rows, seconds).

        Where `last` computes longer than it reads, at the peaks, all terms grow as fitted.
        Otherwise the points do not determine the cost of FLOPs: activations and attention
        grow, and FLOPs, in tiles of 128 rows or more, count once they alone take longer.
        """
        last_rows, last_s = last
        _, reading_s, computing_s, *_ = self._unit_s(last_rows, context, batch)
        if computing_s >= reading_s:
            last_fitted_s = self.fitted_s(last_rows, context, batch)
            return last_s * self.fitted_s(rows, context, batch) / last_fitted_s
        before, after = (
            self._terms_s(count, context, batch, _USUAL_TILE) for count in (last_rows, rows)
        )
        attention_s, attention_before_s = after[3] + after[4], before[3] + before[4]
        added_s = attention_s - attention_before_s + after[5] - before[5]
        return np.asarray(np.maximum(last_s + added_s, after[2] + attention_s))

    def _terms_s(
        self, rows: ArrayLike, context: ArrayLike, batch: ArrayLike, least_tile: int = 1
    ) -> list[Array]:
        """Seconds of each of COEFFICIENTS, matrix FLOPs in tiles of `least_tile` rows or more."""
        unit_s = self._unit_s(rows, context, batch, least_tile)
        return [factor * term for factor, term in zip(self.coefficients, unit_s, strict=True)]

    def _unit_s(
        self, rows: ArrayLike, context: ArrayLike, batch: ArrayLike, least_tile: int = 1
    ) -> list[Array]:
        """The same at the peaks, where each coefficient is 1."""
        shape = KernelShape(max(self.tile_rows, least_tile), self.attention_rows)
        return _in_shape(_shapeless(self.roofline, rows, context, batch), shape)

    @property
    def bound(self) -> Roofline:
        return self.roofline.with_count("physical")

    def intervals(self) -> dict[str, tuple[float, float] | None]:
        """95 % interval of each coefficient; None where the points do not determine it."""
        free = max(self.points - len(COEFFICIENTS), 1)
        width = 1.96 + (1.96**3 + 1.96) / (4 * free)  # Student's t, first order
        pairs = [(getattr(self, name), getattr(self, f"{name}_se")) for name in COEFFICIENTS]
        around = [
            None if error is None else (max(value - width * error, 0.0), value + width * error)
            for value, error in pairs
        ]
        return dict(zip(COEFFICIENTS, around, strict=True))


def _shapeless(
    roofline: Roofline, rows: ArrayLike, context: ArrayLike, batch: ArrayLike
) -> tuple[Array, ...]:
    """New tokens of a sequence and of all, and the terms as they are in any kernel shape."""
    s, c, b = np.broadcast_arrays(
        *(np.asarray(value, dtype=np.float64) for value in (rows, context, batch))
    )
    moved = paper_bytes(roofline.architecture, s, 0, b, roofline.element_bytes)
    scores = 2.0 * roofline.element_bytes * roofline.architecture.attention_layers * b * s * s
    io = moved.attention_io - scores * roofline.architecture.heads + moved.ffn_io + moved.lm_head_io
    activations = io / (roofline.peaks.bytes_per_s * roofline.tensor_parallel)
    return s, s * b, *work_terms(roofline, s, c, b), activations


def _in_shape(terms: tuple[Array, ...], shape: KernelShape) -> list[Array]:
    s, tokens, floor, weights, matrix, attention, kv, activations = terms
    matrix = matrix * (np.ceil(tokens / shape.tile_rows) * shape.tile_rows / tokens)
    # One row takes a kernel that splits the keys and costs what reading them costs.
    filled = np.where(s > 1, np.maximum(tokens, shape.attention_rows) / tokens, 0.0)
    return [floor, weights, matrix, kv, attention * filled, activations]


def communication_term(
    roofline: Roofline, rows: ArrayLike, batch: ArrayLike, switch_tokens: int
) -> Array:
    """Unit seconds of the all-reduces of as many tokens as take longer."""
    tokens = np.asarray(rows, dtype=np.float64) * np.asarray(batch, dtype=np.float64)
    return np.where(tokens > switch_tokens, work_terms(roofline, 1, 0)[0], 0.0)


def fit_physical(points: Points, roofline: Roofline) -> PhysicalCalibration:
    """Least relative squares over kernel shapes and coefficients, robustly.

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
    best = first = _search(points, roofline, factor, weights)
    for _ in range(2):
        weights = _tukey(best.residual, len(points))
        best = _search(points, roofline, factor, weights)
    # All coefficients at once, each point on its slower branch, until they settle.
    prior = _prior(factor, len(COEFFICIENTS), len(best.coefficients))
    for _ in range(20):
        design = _active(best.terms, best.coefficients)
        penalty = _PRIOR_WEIGHT * np.sum(weights) / factor**2
        solved = non_negative_minima(design[None], weights, prior, penalty)[0][0]
        change = np.max(np.abs(solved - best.coefficients)) / factor
        best = dataclasses.replace(best, coefficients=solved)
        weights = _tukey(best.residual, len(weights))
        if change < 1e-6:
            break
    # The few rows may be half of all points: fitting them alone would call the rest outliers.
    if _most(best) > 3 * _most(first):
        best, weights = first, _tukey(first.residual, len(points))
    spread = _spread(best.residual, len(points))
    values = best.coefficients[: len(COEFFICIENTS)].tolist()
    fields: dict[str, Any] = dict(zip(COEFFICIENTS, values, strict=True))
    design = _active(best.terms, best.coefficients)
    penalty = _PRIOR_WEIGHT * np.sum(weights) / factor**2
    hessian = design.T @ (design * weights[:, None]) + penalty * np.eye(design.shape[1])
    variances = np.diag(np.linalg.inv(hessian) * spread**2)
    for index, name in enumerate(COEFFICIENTS):  # those of terms that some point depends on
        if np.any(design[:, index] > 0):
            fields[f"{name}_se"] = float(np.sqrt(variances[index]))
    if best.shape.switch_tokens is not None:
        fields["communication"] = float(best.coefficients[-1])
    try:
        calibration = PhysicalCalibration(
            **fields, **best.shape._asdict(), noise=spread, points=len(points)
        )
    except ValidationError:
        raise InputError(
            "no sum of physical work fits the points",
            hint="Check their rows, contexts and unit, or measure them again.",
        ) from None
    return calibration.over(roofline)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Fit:
    """One candidate fit: terms over the measured seconds [n, 6], and their coefficients.

    With communication there is a seventh.
    """

    shape: KernelShape
    terms: Array
    coefficients: Array

    @property
    def residual(self) -> Array:
        return np.asarray(_active(self.terms, self.coefficients) @ self.coefficients - 1)


def _search(points: Points, roofline: Roofline, factor: float, weights: Array) -> _Fit:
    """The best fit over all kernel shapes; under tensor parallelism also with communication."""
    penalty = _PRIOR_WEIGHT * np.sum(weights) / factor**2
    work = _shapeless(roofline, points.rows, points.context, points.batch)

    def fit_of(shape: KernelShape) -> tuple[float, _Fit]:
        """Loss and fit at the best ratio of FLOPs to weights."""
        columns = _in_shape(work, shape)
        if (most := shape.switch_tokens) is not None:
            columns.append(communication_term(roofline, points.rows, points.batch, most))
        terms = np.stack(columns, axis=1) / points.seconds[:, None]
        matrix = np.maximum(terms[:, 1], _RATIOS[:, None] * terms[:, 2])  # [ratios, n]
        rest = np.broadcast_to(
            np.delete(terms, [1, 2], axis=1), (len(_RATIOS), len(terms), terms.shape[1] - 2)
        )
        design = np.concatenate([rest[:, :, :1], matrix[:, :, None], rest[:, :, 1:]], axis=2)
        prior = _prior(factor, 5, design.shape[2])
        solved, loss = non_negative_minima(design, weights, prior, penalty)
        index = int(np.argmin(loss))
        full = np.insert(solved[index], 2, solved[index][1] * _RATIOS[index])
        return float(loss[index]), _Fit(shape=shape, terms=terms, coefficients=full)

    def best_of(shapes: Iterable[KernelShape]) -> _Fit:
        return min(map(fit_of, shapes), key=lambda fit: fit[0])[1]

    tiles = [KernelShape(*rows) for rows in product(TILES, _ATTENTION_ROWS)]
    best = best_of(tiles)
    if roofline.tensor_parallel == 1:
        return best
    tokens = points.rows * points.batch
    inside = [n for n in _SWITCH_TOKENS if np.any(tokens > n) and np.any(tokens <= n)]
    if not inside:
        return best
    apart = best_of(best.shape._replace(switch_tokens=n) for n in inside)
    switch = apart.shape.switch_tokens
    apart = best_of(shape._replace(switch_tokens=switch) for shape in tiles)
    lost, left = (float(weights @ fit.residual**2) for fit in (best, apart))
    return apart if left < (1 - _WORTH_A_TERM) * lost else best


def _prior(factor: float, physical: int, size: int) -> Array:
    """No floor, `factor` for the other `physical` terms, no communication; [size]."""
    return np.array([0.0] + [factor] * (physical - 1) + [0.0] * (size - physical))


def _active(terms: Array, coefficients: Array) -> Array:
    """The terms, with the faster of weights and matrix FLOPs set to 0 at each point."""
    compute = coefficients[2] * terms[:, 2] > coefficients[1] * terms[:, 1]
    design = terms.copy()
    design[compute, 1] = 0.0
    design[~compute, 2] = 0.0
    return design


def _most(fit: _Fit) -> float:
    """The residual that four of five points do not exceed."""
    return float(np.quantile(np.abs(fit.residual), 0.8))


def _spread(residual: Array, count: int) -> float:
    """Robust standard deviation of the residuals, corrected for the fitted coefficients."""
    free = max(count - len(COEFFICIENTS), 1)
    return robust_sigma(residual) * float(np.sqrt(count / free)) + 1e-7


def _tukey(residual: Array, count: int) -> Array:
    """Bisquare weights; scaled by a median, so at least half of the points have weight."""
    scaled = residual / (_TUKEY * _spread(residual, count))
    weights: Array = np.where(np.abs(scaled) < 1, (1 - scaled**2) ** 2, 0.0)
    return np.maximum(weights, 1e-6)
