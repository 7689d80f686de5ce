"""Policies that verify all of the tree that a growth rule makes: beams and static trees."""

from __future__ import annotations

from dataclasses import dataclass

from decoder.growth import Beam, EveryChild, Growth, grow, source_of
from decoder.policies.base import Candidates, Limits, PolicyBase
from decoder.tree import DraftTree, best_first


@dataclass(slots=True)
class Grown(PolicyBase):
    """Every node of the tree that `growth` makes of a drafter's candidates.

    A drafter that goes level by level has applied the rule already, which changes nothing.
    """

    name: str
    growth: Growth

    @property
    def max_nodes(self) -> int:
        return self.growth.max_nodes

    def choose(self, candidates: Candidates, context: int, limits: Limits) -> DraftTree:
        grown = grow(source_of(candidates), self.growth, limits.depth)
        return best_first(grown, limits.nodes)


def beam(width: int, depth: int) -> Grown:
    """`beam:WxD`: the W best paths at each of D levels, at most W * D nodes."""
    return Grown(f"beam:{width}x{depth}", Beam(width=width, max_depth=depth))


def static_tree(depth: int, width: int, most: int, least_score: float = 0.0) -> Grown:
    """`static-tree:DxB` or `static-tree:DxB:TAU`: B children a node down to depth D.

    Of a tree of more than `most` nodes the first ones, breadth first. `least_score`
    leaves out nodes of a lower path score, as DynaTree's fixed tree does (0.1).
    """
    nodes = depth if width == 1 else (width ** (depth + 1) - width) // (width - 1)
    shape = EveryChild(
        width=width, max_depth=depth, max_nodes=min(nodes, most), least_score=least_score
    )
    suffix = f":{least_score:g}" if least_score else ""
    return Grown(f"static-tree:{depth}x{width}{suffix}", shape)
