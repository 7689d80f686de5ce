"""The policies of a fixed shape: plain steps, a chain, a tree of a fixed size."""

from __future__ import annotations

from dataclasses import dataclass, field

from decoder.growth import UNBOUNDED, Growth, single_path
from decoder.policies.base import DEFAULT_MAX_NODES, Candidates, Limits, PolicyBase
from decoder.tree import EMPTY, DraftTree, best_first, chain


@dataclass(slots=True)
class Plain(PolicyBase):
    """No speculation: one target step a token."""

    name: str = "plain"
    max_nodes: int = 0

    def wants_draft(self, context: int, batch: int = 1) -> bool:
        return False

    def choose(self, candidates: Candidates, context: int, limits: Limits) -> DraftTree:
        return EMPTY


@dataclass(slots=True)
class Chain(PolicyBase):
    """The drafter's single most probable path, as deep as it drafts."""

    name: str = "chain"
    max_nodes: int = DEFAULT_MAX_NODES
    growth: Growth = field(default_factory=lambda: single_path(UNBOUNDED))

    def choose(self, candidates: Candidates, context: int, limits: Limits) -> DraftTree:
        return chain(candidates, min(limits.depth, limits.nodes))


@dataclass(slots=True)
class Fixed(PolicyBase):
    """The best-first tree of a fixed number of nodes (DDTree)."""

    max_nodes: int
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = f"fixed:{self.max_nodes}"

    def choose(self, candidates: Candidates, context: int, limits: Limits) -> DraftTree:
        return best_first(candidates, min(self.max_nodes, limits.nodes))
