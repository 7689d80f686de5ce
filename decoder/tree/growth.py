"""Growth of candidate trees level by level, under a growth rule.

A source gives the children of a level's nodes. A rule selects the children that become nodes
and the nodes that are expanded next. `grow` calls the source once a level, so a drafting
model runs one forward a level.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from costmodel.statistics import Array, Bools, Ints
from decoder.tree.draft_tree import CandidateTree

UNBOUNDED = 1 << 30
NO_CHILD = -1.0  # the probability of a place where a source has no child

Children = tuple[Ints, Array]


@dataclass(frozen=True, slots=True)
class Frontier:
    """F nodes of one level that are to be expanded, in the order of their rows.

    depth   of these nodes; children of the root have depth 1
    rows    int64 [F]  in the candidate tree: row 0 is the root, row i + 1 is node i
    tokens  int64 [F]
    above   int64 [F]  index of the parent in the frontier before, which is its row in the
                       source's last answer
    ranks   int64 [F]  rank among the parent's children, which is the column there
    """

    depth: int
    rows: Ints
    tokens: Ints
    above: Ints
    ranks: Ints


class LevelSource(Protocol):
    """The children of nodes, level by level: first `root`, then `expand`.

    Both return tokens int64 [F, K] and probabilities float64 [F, K] given the parent,
    descending in each row, with K <= `width`, and F = 1 for the root. A negative probability
    or NaN marks a place without a child.
    """

    def root(self, width: int) -> Children:
        """Children of the root; starts a new tree."""

    def expand(self, frontier: Frontier, width: int) -> Children:
        """Children of the frontier's nodes, one row each."""


class Growth(Protocol):
    """A growth rule: the children that become nodes, and the nodes that are expanded."""

    @property
    def width(self) -> int:
        """Children considered below each expanded node."""

    @property
    def max_depth(self) -> int: ...

    @property
    def max_nodes(self) -> int:
        """Nodes after which growth stops, in the order of their rows."""

    def keep(self, depth: int, scores: Array, probabilities: Array) -> Bools:
        """Which children at `depth` become nodes, [F, K].

        scores [F]            path scores of the expanded nodes, their parents
        probabilities [F, K]  of the children, descending in each row; negative if there is no
                              child, and such a place is never kept
        """

    def expand(self, depth: int, scores: Array) -> Bools:
        """Which of the nodes at `depth`, with path scores [M], are expanded further."""


def grow(source: LevelSource, growth: Growth, depth: int) -> CandidateTree:
    """The tree that `growth` makes of the source's children, at most `depth` deep.

    Nodes are ordered by level, parent and rank (breadth first), so parents come before their
    children.
    """
    deepest = min(depth, growth.max_depth)
    rows, scores = np.zeros(1, np.int64), np.ones(1)
    levels: list[tuple[Ints, Ints, Array]] = []
    nodes = 0
    if deepest < 1:
        return CandidateTree(rows[:0], rows[:0], scores[:0])
    tokens, probabilities = source.root(growth.width)
    for level in range(1, deepest + 1):
        probabilities = np.where(probabilities >= 0.0, probabilities, NO_CHILD)
        selected = growth.keep(level, scores, probabilities) & (probabilities >= 0.0)
        above, ranks = (index[: growth.max_nodes - nodes] for index in np.nonzero(selected))
        if len(above) == 0:
            break
        level_probabilities = probabilities[above, ranks]
        levels.append((tokens[above, ranks], rows[above], level_probabilities))
        level_scores = scores[above] * level_probabilities
        expanded = np.flatnonzero(growth.expand(level, level_scores))
        if level == deepest or len(expanded) == 0 or nodes + len(above) == growth.max_nodes:
            break
        rows, scores = nodes + 1 + expanded, level_scores[expanded]
        nodes += len(above)
        above, ranks = above[expanded], ranks[expanded]
        frontier = Frontier(level, rows, tokens[above, ranks], above, ranks)
        tokens, probabilities = source.expand(frontier, growth.width)
    if not levels:
        return CandidateTree(rows[:0], rows[:0], scores[:0])
    return CandidateTree(*(np.concatenate(part) for part in zip(*levels, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TopPaths:
    """Every considered child becomes a node; the best `frontier` of a level are expanded.

    This is the growth of EAGLE-2 and EAGLE-3, with their defaults (SafeAILab/EAGLE,
    eagle/model/cnets.py); they verify the best nodes of all levels, as a best-first policy
    does. Their depth of 7 counts the expansions after the root's, so there are 8 levels.
    """

    width: int = 10
    frontier: int = 10
    max_depth: int = 8
    max_nodes: int = UNBOUNDED

    def keep(self, depth: int, scores: Array, probabilities: Array) -> Bools:
        return np.ones(probabilities.shape, np.bool_)

    def expand(self, depth: int, scores: Array) -> Bools:
        return best(scores, self.frontier)


SINGLE_PATH = TopPaths(width=1, frontier=1, max_depth=UNBOUNDED)  # the growth of a chain


def best(scores: Array, count: int) -> Bools:
    """True at the `count` largest values, the first ones among equals; any shape."""
    taken = np.zeros(scores.size, np.bool_)
    taken[np.argsort(-scores, axis=None, kind="stable")[:count]] = True
    return taken.reshape(scores.shape)
