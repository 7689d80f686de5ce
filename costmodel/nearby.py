"""A cost model read once for each short stretch of context."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from costmodel.cycle import CycleCost

Array = NDArray[np.float64]
Answer = TypeVar("Answer")

STRETCH = 32  # tokens of context; costs are those at the middle of it
_MOST_KEPT = 4096


class NearbyCost:
    """What `CycleCost` says, kept: a decoder asks in every round, in many of them the same.

    A forward drives from the processor's caches whatever reading a profile takes, so that in
    a round it takes five times as long as in a loop of its own.
    """

    def __init__(self, cost: CycleCost) -> None:
        self._cost = cost
        self._kept: dict[Hashable, Any] = {}

    def forward_s(self, rows: float, context: float, batch: int) -> float:
        """Seconds of the target's forward over so many rows a sequence, padding included."""

        def ask(middle: float) -> float:
            return float(self._cost.verify.predict_s(rows, middle, batch))

        return self._once(ask, context, "forward", rows, batch)

    def cycle_s(self, nodes: Array, context: float, batch: int) -> tuple[Array, Array]:
        """Seconds of the forwards over N nodes, and of the rest of those cycles; [n] each."""

        def ask(middle: float) -> tuple[Array, Array]:
            rest_s = self._cost.overhead_s(nodes) + self._cost.draft_s(middle)
            return self._cost.verify_s(nodes, middle, batch), rest_s

        return self._once(ask, context, "cycle", nodes.tobytes(), nodes.shape, batch)

    def draft_s(self, context: float) -> float:
        """Seconds of one draft."""
        return self._once(self._cost.draft_s, context, "draft")

    def plain_s(self, context: float, batch: int) -> float:
        """Seconds of one plain step."""
        return self._once(lambda middle: self._cost.plain_s(middle, batch), context, "plain", batch)

    def _once(self, ask: Callable[[float], Answer], context: float, *asked: Hashable) -> Answer:
        stretch = int(context) // STRETCH
        key = (stretch, *asked)
        if key not in self._kept:
            if len(self._kept) == _MOST_KEPT:
                self._kept.clear()
            self._kept[key] = ask(STRETCH * (stretch + 0.5))
        answer: Answer = self._kept[key]
        return answer
