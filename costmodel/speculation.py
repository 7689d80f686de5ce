"""Acceptance curves, and the regret of choosing tree sizes by predicted times."""

from __future__ import annotations

import dataclasses

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
    """Shares of tokens/s lost, 0 .. 1, by choosing N from predicted times instead of true ones.

    There are `decisions` choices. Times of verifications alone give the regret for a free draft,
    the harder case.
    """

    mean: float
    worst: float
    decisions: int
