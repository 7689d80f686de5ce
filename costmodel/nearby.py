"""A cost model read once for each short stretch of context."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from costmodel.cycle import CycleCost

Array = NDArray[np.float64]

STRETCH = 32  # tokens of context; costs are those at the middle of it
_KEPT = 4096


class NearbyCost:
    """What `CycleCost` says, kept: a decoder asks in every round, in many of them the same.

    A forward drives from the processor's caches whatever reading a profile takes, so that in
    a round it takes five times as long as in a loop of its own.
    """

    def __init__(self, cost: CycleCost) -> None:
        @lru_cache(_KEPT)
        def forward_s(rows: float, stretch: int, batch: int) -> float:
            return float(cost.verify.predict_s(rows, _middle(stretch), batch))

        @lru_cache(_KEPT)
        def cycle_s(nodes: bytes, stretch: int, batch: int) -> tuple[Array, Array]:
            counts, context = np.frombuffer(nodes), _middle(stretch)
            rest_s = cost.overhead_s(counts) + cost.draft_s(context)
            return cost.verify_s(counts, context, batch), rest_s

        @lru_cache(_KEPT)
        def draft_s(stretch: int) -> float:
            return cost.draft_s(_middle(stretch))

        @lru_cache(_KEPT)
        def plain_s(stretch: int, batch: int) -> float:
            return cost.plain_s(_middle(stretch), batch)

        self._forward_s, self._cycle_s = forward_s, cycle_s
        self._draft_s, self._plain_s = draft_s, plain_s

    def forward_s(self, rows: float, context: float, batch: int) -> float:
        """Seconds of the target's forward over so many rows a sequence, padding included."""
        return self._forward_s(float(rows), int(context) // STRETCH, batch)

    def cycle_s(self, nodes: Array, context: float, batch: int) -> tuple[Array, Array]:
        """Seconds of the forwards over N nodes, and of the rest of those cycles; [n] each."""
        return self._cycle_s(nodes.tobytes(), int(context) // STRETCH, batch)

    def draft_s(self, context: float) -> float:
        """Seconds of one draft."""
        return self._draft_s(int(context) // STRETCH)

    def plain_s(self, context: float, batch: int) -> float:
        """Seconds of one plain step."""
        return self._plain_s(int(context) // STRETCH, batch)


def _middle(stretch: int) -> float:
    return STRETCH * (stretch + 0.5)
