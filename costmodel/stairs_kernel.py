"""How the log ratio of true to physical time varies: stairs in rows, smooth in context.

Covariance of two shapes, as variances of log seconds:
- a level common to all;
- steps: a random walk over the rows that moves at tile edges, most at the first (`step_mass`),
  so that between two measured row counts the ratio is interpolated and beyond them kept;
- tiles: row counts in one tile of 16, 64 or 128 rows run the same kernels (`same_tile`);
- context: what the share of attention in the time is misjudged by, alike for near row counts
  and contexts.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

LEVEL = 0.02
_STEP_SHARES = {128: 1.0, 64: 0.5, 32: 0.25, 16: 0.15}
_SMOOTH_SHARE = 0.3
_FIRST_ROW = 0.3  # one row and two run different kernels
_TILE_SHARES = {16: 0.2, 64: 0.4, 128: 0.4}
_CONTEXT_SCALE = 1.5  # in ln(context + 64): a factor of 4.5
_CONTEXT_OFFSET = 64.0
_ONE_ROW_ALIKE = 0.2  # how much attention of one row tells about that of more
_EULER = 0.5772156649


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Standard deviations of log seconds: steps, tiles, the share of attention, noise."""

    step: float
    tile: float
    context: float
    noise: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Places:
    """Shapes as the covariance sees them: tokens (rows x batch), more than one row or not,
    context, and the share of the time that is attention; arrays of one length."""

    tokens: Array
    many: NDArray[np.bool_]
    context: Array
    share: Array

    def by_rows(self) -> tuple[Places, NDArray[np.intp]]:
        """Each token count once (context and share mean nothing then), and which one is whose."""
        _, first, which = np.unique(
            np.stack([self.tokens, self.many]), axis=1, return_index=True, return_inverse=True
        )
        once = Places(
            tokens=self.tokens[first],
            many=self.many[first],
            context=self.context[first],
            share=self.share[first],
        )
        return once, which.ravel()


def step_mass(tokens: ArrayLike) -> Array:
    """Steps to expect up to so many tokens, in units of the one after 128.

    The k-th edge of a tile weighs 1 / k, since a further tile then adds a k-th of the work.
    """
    r = np.asarray(tokens, dtype=np.float64)
    mass = _SMOOTH_SHARE * np.log2(r) + _FIRST_ROW * (r > 1)
    for tile, share in _STEP_SHARES.items():
        mass = mass + share * _harmonic(np.ceil(r / tile) - 1)
    return np.asarray(mass, dtype=np.float64)


def same_tile(one: Array, other: Array) -> Array:
    """Shares of the tile sizes whose tiles two token counts have in common, [n, m]."""
    total = np.zeros((len(one), len(other)))
    for tile, share in _TILE_SHARES.items():
        left, right = (np.where(r > 1, np.ceil(r / tile), 0.0) for r in (one, other))
        total += share * (left[:, None] == right[None, :])
    return total


def over_rows(one: Places, other: Places) -> tuple[Array, Array, Array]:
    """Steps, tiles and the rows' part of the context term, each [n, m] at unit scale."""
    steps = np.minimum(step_mass(one.tokens)[:, None], step_mass(other.tokens)[None, :])
    distance = np.log(one.tokens)[:, None] - np.log(other.tokens)[None, :]
    alike = np.where(one.many[:, None] == other.many[None, :], 1.0, _ONE_ROW_ALIKE)
    return steps, same_tile(one.tokens, other.tokens), alike * np.exp(-0.5 * distance**2)


def over_context(one: ArrayLike, other: ArrayLike) -> Array:
    """The contexts' part of the context term, [n, m]."""
    left, right = (
        np.log(np.atleast_1d(np.asarray(c, dtype=np.float64)) + _CONTEXT_OFFSET)
        for c in (one, other)
    )
    distance = (left[:, None] - right[None, :]) / _CONTEXT_SCALE
    return np.asarray(np.exp(-0.5 * distance**2), dtype=np.float64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """The terms of a covariance at unit scale, to be summed for any scales."""

    steps: Array
    tiles: Array
    context: Array

    @classmethod
    def of(cls, one: Places, other: Places) -> Parts:
        (left, left_of), (right, right_of) = one.by_rows(), other.by_rows()
        cells = np.ix_(left_of, right_of)
        steps, tiles, rows = (part[cells] for part in over_rows(left, right))
        shared = one.share[:, None] * other.share[None, :]
        return cls(
            steps=steps,
            tiles=tiles,
            context=shared * rows * over_context(one.context, other.context),
        )

    def covariance(self, scales: Scales) -> Array:
        """[n, m], without noise."""
        total: Array = (
            LEVEL**2
            + scales.step**2 * self.steps
            + scales.tile**2 * self.tiles
            + scales.context**2 * self.context
        )
        return total


def _harmonic(count: Array) -> Array:
    """1 + 1/2 + ... + 1/n within 1e-3, 0 for n = 0."""
    n = np.maximum(count, 1.0)
    total: Array = np.log(n) + _EULER + 1 / (2 * n) - 1 / (12 * n**2)
    return np.where(count >= 1, total, 0.0)
