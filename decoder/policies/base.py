"""The interface of a budget policy, which chooses each round's draft tree; fixed shapes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from costmodel.calibration.points import Calibration
from costmodel.profile.profile import Profile
from costmodel.statistics import Array, Ints
from decoder.acceptance.rules import RuleName
from decoder.statistics import Round
from decoder.tree.draft_tree import EMPTY, Candidates, DraftTree, best_first, chain
from decoder.tree.growth import SINGLE_PATH, Growth, TopPaths

# Gives another calibration of a profile than the selected one.
Fit = Callable[[Profile], Calibration]
# Gives a policy its cost model: that of the profile, or of what a `Fit` makes of the profile.
FindCost = Callable[..., "Cost"]

DEFAULT_MAX_NODES = 256
GRAPHS_MAX_NODES = 255  # 256 rows fill a bucket, and 257 are padded to 384


class Cost(Protocol):
    """The cost model of a policy; `costmodel.online.OnlineEstimator` is one."""

    def plain_s(self, context: float, batch: int = 1) -> float:
        """Seconds of a plain step of `batch` sequences."""

    def draft_s(self, context: float) -> float:
        """Seconds of one sequence's draft."""

    def sizes(self, most: int) -> Ints:
        """Tree sizes of at most `most` nodes worth scoring, ascending, 0 first."""

    def cycle_s(self, nodes: Array, context: float, batch: int = 1) -> Array:
        """Seconds of whole cycles with N nodes a sequence, the draft included."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a sequence's tree: nodes by the policy, depth by the tokens still wanted."""

    nodes: int
    depth: int


@dataclass(frozen=True, slots=True)
class TreeRequest:
    """What a policy chooses a sequence's tree from; `context` is its cached tokens."""

    candidates: Candidates
    context: int
    limits: Limits


class Policy(ABC):
    """Chooses the draft tree of each round; one object serves all texts of a decoder.

    A subclass needs `name`, `max_nodes` and `choose`. The rest has a default: draft in every
    round, choose each sequence's tree by itself, learn nothing.

    max_nodes   of the largest tree that it chooses; the KV cache has room for it
    growth      of a drafter that expands its tree level by level
    acceptance  the rule above T = 0, unless the decoder is given another
    tempered    whether trees that are walked are scored by q at the text's temperature, else at 1
    """

    name: str
    max_nodes: int
    growth: Growth = TopPaths()
    acceptance: ClassVar[RuleName] = "auto"
    tempered: ClassVar[bool] = True

    @abstractmethod
    def choose(self, candidates: Candidates, context: int, limits: Limits) -> DraftTree:
        """The tree to verify behind `context` cached tokens; `EMPTY` for a plain step."""

    def choose_together(self, requests: Sequence[TreeRequest]) -> list[DraftTree]:
        """The trees of several sequences that are verified in one forward."""
        return [
            self.choose(request.candidates, request.context, request.limits) for request in requests
        ]

    def wants_draft(self, context: int, batch: int = 1) -> bool:
        """Whether to draft in this round; called in every round, before the drafter runs."""
        return True

    def wanted_nodes(self) -> int:
        """Candidates a sequence that this round can use, from 1 to `max_nodes`."""
        return max(self.max_nodes, 1)

    def observe(self, finished: Round) -> None:  # noqa: B027 - most policies learn nothing
        """Called after each round, for each sequence; plain steps included."""

    def ended(self, text: int) -> None:  # noqa: B027 - most policies learn from rounds alone
        """Called when a text is over, with its number in `Round.text`; interrupted ones too."""


class Plain(Policy):
    """No speculation: one target step a token."""

    name, max_nodes = "plain", 0

    def wants_draft(self, context: int, batch: int = 1) -> bool:
        return False

    def choose(self, candidates: Candidates, context: int, limits: Limits) -> DraftTree:
        return EMPTY


class Chain(Policy):
    """The drafter's most probable path, in its whole depth."""

    name = "chain"
    growth: Growth = SINGLE_PATH
    acceptance: ClassVar[RuleName] = "walk"

    def __init__(self, max_nodes: int = DEFAULT_MAX_NODES) -> None:
        self.max_nodes = max_nodes

    def choose(self, candidates: Candidates, context: int, limits: Limits) -> DraftTree:
        return chain(candidates, min(limits.depth, limits.nodes))


class Fixed(Policy):
    """The best-first tree of a fixed number of nodes (DDTree)."""

    acceptance: ClassVar[RuleName] = "walk"
    tempered: ClassVar[bool] = False

    def __init__(self, max_nodes: int) -> None:
        self.name, self.max_nodes = f"fixed:{max_nodes}", max_nodes

    def choose(self, candidates: Candidates, context: int, limits: Limits) -> DraftTree:
        return best_first(candidates, min(self.max_nodes, limits.nodes))
