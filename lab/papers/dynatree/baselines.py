"""Beams and static trees, the baselines of the DynaTree paper, and what grows them.

A rule keeps the whole of a tree that it has grown. So a policy may apply its rule to any
candidates, whether a drafter has applied it before or not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import numpy as np

from costmodel.errors import InputError
from costmodel.statistics import Array, Bools
from decoder.acceptance.rules import RuleName
from decoder.policies.base import Limits, Policy
from decoder.tree.draft_tree import Candidates, CandidateTree, DraftTree, Lattice, best_first
from decoder.tree.growth import (
    NO_CHILD,
    UNBOUNDED,
    Children,
    Frontier,
    Growth,
    LevelSource,
    best,
    grow,
)

BEAM = re.compile(r"(\d{1,3})x(\d{1,3})", re.ASCII)
STATIC = re.compile(r"(\d{1,3})x(\d{1,3})(?::(0?\.\d+))?", re.ASCII)


def source_of(candidates: Candidates) -> LevelSource:
    """The children in a drafter's candidates, level by level."""
    if isinstance(candidates, Lattice):
        return partial(_position, candidates)
    return CandidateSource(candidates.as_tree(4096))


def _position(lattice: Lattice, frontier: Frontier, width: int) -> Children:
    """The children of a block drafter's marginals: the same below every node of a depth."""
    count, at = len(frontier.rows), frontier.depth
    if at >= len(lattice.tokens):
        return np.zeros((count, 0), np.int64), np.zeros((count, 0))
    tokens, given = lattice.tokens[[at], :width], lattice.probabilities[[at], :width]
    return np.repeat(tokens, count, axis=0), np.repeat(given, count, axis=0)


class CandidateSource:
    """The children in a candidate tree, such as an n-gram trie, best first."""

    def __init__(self, candidates: CandidateTree) -> None:
        self._candidates = candidates
        # Children of one parent lie together, by falling probability; ties stay in order.
        self._order = np.lexsort((-candidates.probabilities, candidates.parents))
        self._counts = np.bincount(candidates.parents, minlength=len(candidates.parents) + 1)
        self._starts = np.cumsum(self._counts) - self._counts
        self._offered = np.zeros((0, 0), np.int64)

    def __call__(self, frontier: Frontier, width: int) -> Children:
        rows = frontier.rows
        if frontier.depth:
            rows = self._offered[frontier.above, frontier.ranks] + 1
        counts = self._counts[rows]
        ranks = np.arange(min(width, int(counts.max(initial=0))))
        there = ranks < counts[:, None]
        places = np.where(there, self._starts[rows][:, None] + ranks, 0)
        self._offered = self._order[places] if there.any() else np.zeros(there.shape, np.int64)
        if not there.any():
            return self._offered, np.full(there.shape, NO_CHILD)
        probabilities = np.where(there, self._candidates.probabilities[self._offered], NO_CHILD)
        return self._candidates.tokens[self._offered], probabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class Beam:
    """The `width` best paths at each of `max_depth` levels, all of them nodes."""

    width: int
    max_depth: int

    @property
    def max_nodes(self) -> int:
        return self.width * self.max_depth

    def keep(self, depth: int, scores: Array, probabilities: Array) -> Bools:
        paths = np.where(probabilities < 0.0, NO_CHILD, scores[:, None] * probabilities)
        return best(paths, self.width)

    def expand(self, depth: int, scores: Array) -> Bools:
        return np.ones(scores.shape, np.bool_)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedTree:
    """The fixed tree of the DynaTree paper: one drafted token, and `levels` levels below it.

    width        B: children of every expanded node
    levels       D
    least_score  tau: nodes of a lower path score are not expanded; the paper has 0.1
    """

    width: int
    levels: int
    max_nodes: int = UNBOUNDED
    least_score: float = 0.0

    @property
    def max_depth(self) -> int:
        return self.levels + 1

    def keep(self, depth: int, scores: Array, probabilities: Array) -> Bools:
        children = self.width if depth > 1 else 1
        return np.broadcast_to(np.arange(probabilities.shape[1]) < children, probabilities.shape)

    def expand(self, depth: int, scores: Array) -> Bools:
        return scores >= self.least_score


@dataclass(slots=True)
class Grown(Policy):
    """Every node of the tree that `growth` makes of the drafter's candidates.

    A drafter that expands level by level has applied the same rule before.
    """

    name: str
    growth: Growth
    max_nodes: int = field(init=False)
    acceptance: ClassVar[RuleName] = "walk"

    def __post_init__(self) -> None:
        self.max_nodes = self.growth.max_nodes

    def choose(self, candidates: Candidates, context: int, limits: Limits) -> DraftTree:
        return best_first(grow(source_of(candidates), self.growth, limits.depth), limits.nodes)


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
    """`static-tree:DxB` or `static-tree:DxB:P`: a drafted token and D levels of B children.

    max_nodes  nodes of the tree; of a larger one the first, breadth first
    P          nodes of a lower path score are not expanded
    """
    match = STATIC.fullmatch(arguments)
    levels, width = (int(number) for number in match.groups()[:2]) if match else (0, 0)
    if match is None or min(levels, width) < 1:
        raise InputError(
            f"'static-tree:{arguments}' is not a policy",
            hint="Write static-tree:DxB with a depth and a branching of 1 to 999, as "
            "static-tree:5x2, or static-tree:DxB:P to expand no path below the probability P, "
            "as static-tree:8x3:0.1.",
        )
    nodes = levels + 1 if width == 1 else (width ** (levels + 1) - 1) // (width - 1)
    least_score = float(match[3] or 0.0)
    shape = FixedTree(
        width=width, levels=levels, max_nodes=min(nodes, max_nodes), least_score=least_score
    )
    suffix = f":{least_score:g}" if least_score else ""
    return Grown(f"static-tree:{levels}x{width}{suffix}", shape)
