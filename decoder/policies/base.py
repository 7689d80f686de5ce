"""What a policy is to the decode loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from decoder.growth import Growth, TopPaths
from decoder.tree import CandidateTree, DraftTree, Lattice

Candidates = Lattice | CandidateTree

# Which calibration of the profile a policy wants.
CostKind = Literal["best", "linear"]

DEFAULT_MAX_NODES = 256


class Cost(Protocol):
    """What the controller asks of a cost model; `costmodel.estimator` provides it."""

    def plain_s(self, context: float, batch: int = 1) -> float: ...

    def draft_s(self, context: float) -> float: ...

    def sizes(self, most: int) -> NDArray[np.int64]:
        """Tree sizes of at most `most` nodes worth scoring, ascending, 0 first."""

    def cycle_s(
        self, nodes: NDArray[np.float64], context: float, batch: int = 1
    ) -> NDArray[np.float64]:
        """Seconds of whole cycles with N nodes a sequence, the draft included."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a round's tree: room in the cache and tokens still wanted."""

    nodes: int
    depth: int


@dataclass(frozen=True, slots=True)
class Offer:
    """One sequence's candidates in a round of several sequences."""

    candidates: Candidates
    context: int
    limits: Limits


class Policy(Protocol):
    """Chooses each round's trees; one object lives as long as its decoder.

    `growth` says how a drafter that goes level by level expands its tree.
    """

    name: str
    max_nodes: int
    growth: Growth

    def wants_draft(self, context: int, batch: int = 1) -> bool:
        """Whether to draft at all this round, decided before the drafter has run."""

    def wanted_nodes(self) -> int:
        """Candidates a sequence that this round could use, 1 or more and at most `max_nodes`."""

    def drafted(self, share: float) -> None:
        """Told after the draft: what it took of a whole draft's time (`PartialSession`)."""

    def choose(self, candidates: Candidates, context: int, limits: Limits) -> DraftTree:
        """The tree to verify, `EMPTY` for a plain step."""

    def choose_together(self, offers: Sequence[Offer]) -> list[DraftTree]:
        """The trees of several sequences that are verified in one forward."""

    def observe(self, tree: DraftTree, accepted_rows: list[int], context: int) -> None:
        """What the target accepted of the tree that was chosen."""


class PolicyBase(ABC):
    """A policy that always drafts, takes each sequence by itself and learns nothing."""

    max_nodes: int
    growth: ClassVar[Growth] = TopPaths()

    def wanted_nodes(self) -> int:
        return max(self.max_nodes, 1)

    def wants_draft(self, context: int, batch: int = 1) -> bool:
        return True

    def drafted(self, share: float) -> None:
        """What drafting takes is no concern of a policy without a cost model."""
        return

    @abstractmethod
    def choose(self, candidates: Candidates, context: int, limits: Limits) -> DraftTree:
        """The tree to verify, `EMPTY` for a plain step."""

    def choose_together(self, offers: Sequence[Offer]) -> list[DraftTree]:
        return [self.choose(offer.candidates, offer.context, offer.limits) for offer in offers]

    def observe(self, tree: DraftTree, accepted_rows: list[int], context: int) -> None:
        """Nothing is learnt."""
        return
