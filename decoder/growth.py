"""How a draft tree grows level by level, from any source of children."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Growth(Protocol):
    """Which children a level keeps and which of them are expanded further."""

    width: int  # children looked at below each expanded node
    max_depth: int

    def keep(
        self, depth: int, scores: NDArray[np.float64], probabilities: NDArray[np.float64]
    ) -> NDArray[np.bool_]:
        """Which children become nodes, [F, K], for F expanded nodes at `depth` - 1.

        scores [F]  path scores of the expanded nodes
        probabilities [F, K]  of their children, descending in each row
        """

    def expand(self, depth: int, scores: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Which of the nodes at `depth`, with path scores [M], are expanded further."""
