"""Acceptance curves, and the regret of choosing tree sizes by predicted times."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from costmodel.statistics import Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceCurve:
    """Expected committed tokens a verification, by the number of drafted nodes N.

    A(N) = 1 + (saturation - 1) N / (N + half_nodes): one token without a draft, half of the
    gain at `half_nodes`, and concave like the curve of any best-first tree (paper, eq. 5).
    """

    label: str
    saturation: float
    half_nodes: float

    @property
    def text(self) -> str:
        """A(N) as a formula."""
        return f"1 + {self.saturation - 1:g} N / (N + {self.half_nodes:g})"

    def committed(self, nodes: ArrayLike) -> Array:
        """A(N) in the shape of `nodes`."""
        n = np.asarray(nodes, dtype=np.float64)
        committed: Array = 1.0 + (self.saturation - 1.0) * n / (n + self.half_nodes)
        return committed


# 4.5 tokens a verification, half of the gain at 16 nodes: one of the standard curves.
USUAL_CURVE = AcceptanceCurve(label="usual", saturation=4.5, half_nodes=16.0)


def standard_curves() -> tuple[AcceptanceCurve, ...]:
    """The 18 curves over which decision regret is stated.

    Saturations of 1.3, 2, 3, 4.5, 6.5 and 10 tokens a verification, from a useless drafter to
    the paper's best (table 1), each with half of its gain at 4, 16 and 64 nodes.
    """
    return tuple(
        AcceptanceCurve(
            label=f"{saturation:g} tokens, half at {half_nodes} nodes",
            saturation=saturation,
            half_nodes=half_nodes,
        )
        for saturation in (1.3, 2.0, 3.0, 4.5, 6.5, 10.0)
        for half_nodes in (4, 16, 64)
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Regret:
    """Shares of tokens/s lost, 0 .. 1, over `decisions` choices of N."""

    mean: float
    worst: float
    decisions: int


def decision_regret(
    predicted_s: ArrayLike,
    true_s: ArrayLike,
    nodes: ArrayLike,
    curves: Sequence[AcceptanceCurve] | None = None,
) -> Regret:
    """Tokens/s lost by choosing N from predicted cycle times instead of from true ones.

    predicted_s and true_s: [n] or [contexts, n]; nodes: [n]. There is one decision for each
    context and curve (`standard_curves` by default). Times of verifications alone give the
    regret for a free draft, the harder case.
    """
    predicted = np.atleast_2d(np.asarray(predicted_s, dtype=np.float64))
    true = np.atleast_2d(np.asarray(true_s, dtype=np.float64))
    counts = np.asarray(nodes, dtype=np.float64)
    chosen_curves = standard_curves() if curves is None else curves
    losses = []
    for curve in chosen_curves:
        rate = curve.committed(counts) / true
        chosen = np.argmax(curve.committed(counts) / predicted, axis=1)
        taken = np.take_along_axis(rate, chosen[:, None], axis=1)[:, 0]
        losses.append(1.0 - taken / np.max(rate, axis=1))
    lost = np.concatenate(losses)
    return Regret(mean=float(np.mean(lost)), worst=float(np.max(lost)), decisions=len(lost))
