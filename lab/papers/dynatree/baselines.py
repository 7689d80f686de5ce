"""Beams and static trees, the baselines of the DynaTree paper, and what grows them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from costmodel.errors import InputError
from decoder.policies.base import Limits, Policy
from decoder.tree.draft_tree import Candidates, DraftTree, best_first
from decoder.tree.growth import Beam, EveryChild, Growth, grow, source_of

BEAM = re.compile(r"(\d{1,3})x(\d{1,3})", re.ASCII)
STATIC = re.compile(r"(\d{1,3})x(\d{1,3})(?::(0?\.\d+))?", re.ASCII)


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


def beam(arguments: str) -> Grown:
    """`beam:WxD`: the W best paths at each of D levels; at most W * D nodes."""
    match = BEAM.fullmatch(arguments)
    width, depth = (int(number) for number in match.groups()) if match else (0, 0)
    if min(width, depth) < 1:
        raise InputError(
            f"'beam:{arguments}' is not a policy",
            hint="Write beam:WxD with a width and a depth of 1 to 999, as beam:4x15.",
        )
    return Grown(f"beam:{width}x{depth}", Beam(width=width, max_depth=depth))


def static_tree(arguments: str, max_nodes: int) -> Grown:
    """`static-tree:DxB` or `static-tree:DxB:P`: B children a node down to depth D.

    max_nodes  nodes of the tree; of a larger one the first, breadth first
    P          nodes of a lower path score are left out
    """
    match = STATIC.fullmatch(arguments)
    depth, width = (int(number) for number in match.groups()[:2]) if match else (0, 0)
    if match is None or min(depth, width) < 1:
        raise InputError(
            f"'static-tree:{arguments}' is not a policy",
            hint="Write static-tree:DxB with a depth and a branching of 1 to 999, as "
            "static-tree:5x2, or static-tree:DxB:P to leave out paths below the probability P, "
            "as static-tree:8x3:0.1.",
        )
    nodes = depth if width == 1 else (width ** (depth + 1) - width) // (width - 1)
    least_score = float(match[3] or 0.0)
    shape = EveryChild(
        width=width, max_depth=depth, max_nodes=min(nodes, max_nodes), least_score=least_score
    )
    suffix = f":{least_score:g}" if least_score else ""
    return Grown(f"static-tree:{depth}x{width}{suffix}", shape)
