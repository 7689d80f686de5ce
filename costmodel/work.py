"""A forward's time as non-negative amounts of physical work.

A rough shape that interpolation bends to the measured points and that carries it beyond
them: floor, weight traffic, matrix FLOPs, attention FLOPs and key-value traffic, each in
seconds at the device's peak, times one coefficient.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from itertools import product

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.points import Points
from costmodel.roofline import Roofline, distinct_experts, physical_bytes, physical_flops

Array = NDArray[np.float64]

TERMS = ("floor", "weights", "matrix_flops", "attention_flops", "kv_read")
_WEIGHTS = TERMS.index("weights")
# A coefficient that differs from its prior by the prior's size costs as much as a misfit of
# 3 % at every point: enough to settle what the points leave open, and no more.
_PRIOR_WEIGHT = 0.03**2
_SUBSETS = np.array(list(product([False, True], repeat=len(TERMS))))  # [32, terms]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkModel:
    """seconds = sum over TERMS of coefficient x seconds of that work at the peaks."""

    roofline: Roofline
    coefficients: tuple[float, ...]

    def seconds(self, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1) -> Array:
        """Seconds in the broadcast shape of the arguments; increasing in rows and context."""
        terms = work_terms(self.roofline, rows, context, batch)
        total = sum(
            factor * term for factor, term in zip(self.coefficients, terms, strict=True) if factor
        )
        return np.asarray(total, dtype=np.float64)


def work_terms(
    roofline: Roofline, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1
) -> list[Array]:
    """Seconds of each of TERMS; the floor's unit is the time to read the weights once."""
    a = roofline.architecture
    flops_per_s = roofline.peaks.flops_per_s * roofline.tensor_parallel
    bytes_per_s = roofline.peaks.bytes_per_s * roofline.tensor_parallel
    s, c, b = (np.asarray(value, dtype=np.float64) for value in (rows, context, batch))
    tokens = s * b
    one_row = _one_row(roofline)
    cached = c if a.sliding_window is None else np.minimum(c, a.sliding_window)
    keys = cached + (s + 1) / 2
    weights = (one_row.fixed_bytes + one_row.expert_bytes * distinct_experts(a, tokens)) + 0 * c
    return [
        np.full_like(tokens * keys, one_row.weight_bytes / bytes_per_s),
        weights / bytes_per_s,
        tokens * (one_row.matrix_flops / flops_per_s) + 0 * c,
        tokens * keys * (one_row.attention_flops / flops_per_s),
        b * cached * (one_row.kv_bytes / bytes_per_s) + 0 * s,
    ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _OneRow:
    fixed_bytes: float
    expert_bytes: float
    weight_bytes: float
    matrix_flops: float
    attention_flops: float
    kv_bytes: float


@lru_cache(maxsize=64)
def _one_row(roofline: Roofline) -> _OneRow:
    """Work of one row on one cached token, from the physical count."""
    a = roofline.architecture
    moved = physical_bytes(a, 1, 1, 1, roofline.element_bytes)
    flops = physical_flops(a, 1, 0)
    attention = float(flops.scores + flops.values)
    fixed = float(
        moved.embedding_and_lm_head_weights + moved.attention_weights + moved.small_weights
    )
    per_expert = float(moved.ffn_weights / distinct_experts(a, 1))
    return _OneRow(
        fixed_bytes=fixed,
        expert_bytes=per_expert,
        weight_bytes=fixed + float(moved.ffn_weights),
        matrix_flops=float(flops.total) - attention,
        attention_flops=attention,
        kv_bytes=float(a.layers * 2 * a.kv_width * roofline.element_bytes),
    )


def fit_work(points: Points, roofline: Roofline) -> WorkModel:
    """Non-negative coefficients of least relative error, robust to outliers.

    The prior is one common factor over the physical bound and no floor; it decides only
    what the points cannot (a single context says nothing about the cost of context).
    """
    bound = roofline.with_count("physical").seconds(points.rows, points.context, points.batch)
    factor = float(np.median(points.seconds / bound))
    prior = np.array([0.0] + [factor] * (len(TERMS) - 1))
    terms = work_terms(roofline, points.rows, points.context, points.batch)
    design = np.stack(terms, axis=1) / points.seconds[:, None]
    weights = np.ones(len(points))
    coefficients = prior.copy()
    for _ in range(3):
        coefficients = _non_negative(design, weights, prior, factor)
        residual = np.abs(design @ coefficients - 1)
        limit = 3 * 1.4826 * float(np.median(residual)) + 1e-6
        weights = np.minimum(1.0, limit / np.maximum(residual, 1e-12))
    # Wild points can leave nothing but terms that are 0 at some shape; a time never is.
    coefficients[_WEIGHTS] = max(coefficients[_WEIGHTS], 0.05 * factor)
    return WorkModel(roofline=roofline, coefficients=tuple(float(x) for x in coefficients))


def _non_negative(design: Array, weights: Array, prior: Array, scale: float) -> Array:
    """The non-negative minimum of |design x - 1|^2 + penalty |(x - prior) / scale|^2.

    The objective is strictly convex, so the minimum is the best of the solutions over every
    subset of terms that come out non-negative; with five terms all are tried at once.
    """
    penalty = _PRIOR_WEIGHT * len(weights) / scale**2
    hessian = design.T @ (design * weights[:, None]) + penalty * np.eye(len(prior))
    gradient = design.T @ weights + penalty * prior
    used = _SUBSETS
    # A term that is left out keeps a row of the identity, so its coefficient is 0.
    systems = np.where(used[:, :, None] & used[:, None, :], hessian, np.eye(len(prior)))
    wanted = np.where(used, gradient, 0.0)
    solutions = np.linalg.solve(systems, wanted[:, :, None])[:, :, 0]
    values = np.where(np.all(solutions >= 0, axis=1), -np.sum(solutions * wanted, axis=1), np.inf)
    best: Array = solutions[int(np.argmin(values))]
    return best
