"""Policies of a fixed shape: plain steps, chains, fixed sizes, beams and static trees."""

from __future__ import annotations

from dataclasses import dataclass, field

from decoder.policies.base import DEFAULT_MAX_NODES, Limits, Policy
from decoder.tree.draft_tree import EMPTY, Candidates, DraftTree, best_first, chain
from decoder.tree.growth import UNBOUNDED, Beam, EveryChild, Growth, grow, single_path, source_of


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
    growth: Growth = field(default_factory=lambda: single_path(UNBOUNDED))

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


@dataclass(slots=True)
class Grown(Policy):
    """Every node of the tree that `growth` makes of the drafter's candidates.

    A drafter that expands level by level has applied the same rule before.
    """

    name: str
    growth: Growth
    max_nodes: int = field(init=False)

    def __post_init__(self) -> None:
        self.max_nodes = self.growth.max_nodes

    def choose(self, candidates: Candidates, context: int, limits: Limits) -> DraftTree:
        grown = grow(source_of(candidates), self.growth, limits.depth)
        return best_first(grown, limits.nodes)


def beam(width: int, depth: int) -> Grown:
    """`beam:WxD`: the W best paths at each of D levels; at most W * D nodes."""
    return Grown(f"beam:{width}x{depth}", Beam(width=width, max_depth=depth))


def static_tree(depth: int, width: int, most: int, least_score: float = 0.0) -> Grown:
    """`static-tree:DxB` or `static-tree:DxB:P`: B children a node down to depth D.

    most         nodes of the tree; of a larger one the first, breadth first
    least_score  P: nodes of a lower path score are left out
    """
    nodes = depth if width == 1 else (width ** (depth + 1) - width) // (width - 1)
    shape = EveryChild(
        width=width, max_depth=depth, max_nodes=min(nodes, most), least_score=least_score
    )
    suffix = f":{least_score:g}" if least_score else ""
    return Grown(f"static-tree:{depth}x{width}{suffix}", shape)
