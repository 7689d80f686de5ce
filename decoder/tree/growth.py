"""Growth of candidate trees level by level, under a growth rule.

A source gives the children of a level's nodes. A rule selects the children that become nodes and
the nodes that are expanded next. `grow` calls the source once a level: one forward of a model.
"""

from __future__ import annotations

from collections.abc import Callable
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

    depth   of these nodes; 0 of the root
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


ROOT = Frontier(0, *(np.zeros(1, np.int64) for _ in range(4)))  # begins a tree; has no token

# The children of a frontier's nodes, at most so many (K) of each, `ROOT` first: tokens int64 [F, K]
# and probabilities float64 [F, K] given the parent, descending in each row; negative or NaN where
# there is no child.
LevelSource = Callable[[Frontier, int], Children]


class Growth(Protocol):
    """A growth rule: the children that become nodes, and the nodes that are expanded.

    width      children considered below each expanded node
    max_nodes  nodes after which growth stops, in the order of their rows
    """

    @property
    def width(self) -> int: ...

    @property
    def max_depth(self) -> int: ...

    @property
    def max_nodes(self) -> int: ...

    def keep(self, depth: int, scores: Array, probabilities: Array) -> Bools:
        """Which children at `depth` become nodes, [F, K].

        scores [F]            path scores of the expanded nodes, their parents
        probabilities [F, K]  of the children, descending in each row; negative if there is no
                              child, and such a place is never kept
        """

    def expand(self, depth: int, scores: Array) -> Bools:
        """Which of the nodes at `depth`, with path scores [M], are expanded further."""


def grow(source: LevelSource, growth: Growth, depth: int) -> CandidateTree:
    """The tree that `growth` makes of a source's children, `depth` deep at most, by level."""
    deepest, frontier, scores, nodes = min(depth, growth.max_depth), ROOT, np.ones(1), 0
    levels = [(ROOT.rows[:0], ROOT.rows[:0], scores[:0])]
    for level in range(1, deepest + 1):
        tokens, probabilities = source(frontier, growth.width)
        probabilities = np.where(probabilities >= 0.0, probabilities, NO_CHILD)
        selected = growth.keep(level, scores, probabilities) & (probabilities >= 0.0)
        above, ranks = (index[: growth.max_nodes - nodes] for index in np.nonzero(selected))
        given = probabilities[above, ranks]
        levels.append((tokens[above, ranks], frontier.rows[above], given))
        scores = scores[above] * given
        expanded = np.flatnonzero(growth.expand(level, scores))
        if len(expanded) == 0 or nodes + len(above) == growth.max_nodes:
            break
        rows, scores = nodes + 1 + expanded, scores[expanded]
        nodes += len(above)
        above, ranks = above[expanded], ranks[expanded]
        frontier = Frontier(level, rows, tokens[above, ranks], above, ranks)
    return CandidateTree(*(np.concatenate(part) for part in zip(*levels, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TopPaths:
    """Every considered child becomes a node; the best `frontier` of a level are expanded.

    The growth of EAGLE-2 and EAGLE-3, with their defaults (SafeAILab/EAGLE,
    eagle/model/cnets.py), whose depth of 7 counts the expansions after the root's.
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
