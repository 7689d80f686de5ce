"""What a drafter is to the decode loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from decoder.tree import CandidateTree, Lattice


class Drafter(Protocol):
    """Proposes candidates for the tokens after the bonus token."""

    name: str
    architecture_hash: str  # the key of its cost in a profile
    max_depth: int  # gamma: the deepest position it drafts

    def start(self, prompt: NDArray[np.int64]) -> None:
        """Begin a new sequence with its prompt."""

    def draft(self, context: NDArray[np.int64], depth: int) -> Lattice | CandidateTree:
        """Candidates for up to `depth` tokens after `context`, whose last token is the bonus."""

    def observe(self, emitted: Sequence[int]) -> None:
        """The tokens the target emitted after the last draft, the bonus token included."""
