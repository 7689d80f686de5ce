"""An engine's cost tables of one context, moved to another context by a profile."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from integrations.costs import StepCosts

Array = NDArray[np.float64]


class ContextCurves:
    """Moves tables that an engine measured at one context to the context of a batch.

    The engine's own times are multiplied by the profile's ratio of the two contexts: what the
    engine alone knows, as the padding of its graphs, stays in them.
    """

    def __init__(self, costs: StepCosts, table_context: int, longest: int) -> None:
        """
        table_context  cached tokens at which the engine measured its tables
        longest        tokens of the longest draft of a sequence
        """
        self._costs, self._table_context, self._longest = costs, table_context, longest

    def verify_ms(self, table_ms: Array, batch: int, context: float) -> Array:
        """The table by tokens of a step, for a batch of one new token and its drafts each."""
        most = min(batch * self._longest, len(table_ms) - 1 - batch)
        there_s, here_s = (
            np.array(self._costs.verify_s(batch, at, batch * self._longest)[: most + 1])
            for at in (self._table_context, context)
        )
        moved = table_ms.copy()
        moved[batch : batch + most + 1] *= here_s / there_s
        return moved

    def draft_ms(self, table_ms: Array, batch: int, context: float) -> Array:
        """The table by sequences of a draft."""
        there_s, here_s = (
            self._costs.draft_s(batch, at, self._longest)[-1]
            for at in (self._table_context, context)
        )
        moved = table_ms.copy()
        if there_s > 0:
            moved[batch] *= here_s / there_s
        return moved
