"""Policies of a fixed shape: plain steps, chains and fixed sizes."""

from __future__ import annotations

from dataclasses import dataclass, field

from decoder.policies.base import DEFAULT_MAX_NODES, Limits, Policy
from decoder.tree.draft_tree import EMPTY, Candidates, DraftTree, best_first, chain
from decoder.tree.growth import Growth, SinglePath


@dataclass(slots=True)
class Plain(Policy):
    """No speculation: one target step a token."""

    name: str = "plain"
    max_nodes: int = 0

    def wants_draft(self, context: int, batch: int = 1) -> bool:
        return False

    def choose(self, candidates: Candidates, context: int, limits: Limits) -> DraftTree:
        return EMPTY


@dataclass(slots=True)
class Chain(Policy):
    """The drafter's most probable path, in its whole depth."""

    name: str = "chain"
    max_nodes: int = DEFAULT_MAX_NODES
    growth: Growth = field(default_factory=SinglePath)

    def choose(self, candidates: Candidates, context: int, limits: Limits) -> DraftTree:
        return chain(candidates, min(limits.depth, limits.nodes))


@dataclass(slots=True)
class Fixed(Policy):
    """The best-first tree of a fixed number of nodes (DDTree)."""

    max_nodes: int
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = f"fixed:{self.max_nodes}"

    def choose(self, candidates: Candidates, context: int, limits: Limits) -> DraftTree:
        return best_first(candidates, min(self.max_nodes, limits.nodes))
