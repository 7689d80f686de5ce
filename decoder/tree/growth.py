"""Growth of candidate trees level by level, under a growth rule.

A source gives the children of a level's nodes. A rule selects the children that become nodes
and the nodes that are expanded next. `grow` calls the source once a level, so a drafting
model runs one forward a level. A rule keeps the whole of a tree that it has grown: growing
again from a `CandidateSource` gives the same tree. So a policy may apply its rule to any
candidates, whether a drafter has applied it before or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from decoder.tree.draft_tree import Candidates, CandidateTree, Lattice

UNBOUNDED = 1 << 30
NO_CHILD = -1.0  # the probability of a place where a source has no child

Children = tuple[NDArray[np.int64], NDArray[np.float64]]


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
    rows: NDArray[np.int64]
    tokens: NDArray[np.int64]
    above: NDArray[np.int64]
    ranks: NDArray[np.int64]


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

    def keep(
        self, depth: int, scores: NDArray[np.float64], probabilities: NDArray[np.float64]
    ) -> NDArray[np.bool_]:
        """Which children at `depth` become nodes, [F, K].

        scores [F]            path scores of the expanded nodes, their parents
        probabilities [F, K]  of the children, descending in each row; negative if there is no
                              child, and such a place is never kept
        """

    def expand(self, depth: int, scores: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Which of the nodes at `depth`, with path scores [M], are expanded further."""


def grow(source: LevelSource, growth: Growth, depth: int) -> CandidateTree:
    """The tree that `growth` makes of the source's children, at most `depth` deep.

    Nodes are ordered by level, parent and rank (breadth first), so parents come before their
    children.
    """
    deepest = min(depth, growth.max_depth)
    rows, scores = np.zeros(1, np.int64), np.ones(1)
    levels: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]] = []
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


def source_of(candidates: Candidates) -> LevelSource:
    """The children in a drafter's candidates, level by level."""
    if isinstance(candidates, Lattice):
        return LatticeSource(candidates)
    return CandidateSource(candidates)


class LatticeSource:
    """A block drafter's marginals: every node of a depth has the same children."""

    def __init__(self, lattice: Lattice) -> None:
        self._tokens = lattice.tokens
        self._probabilities = lattice.probabilities

    def root(self, width: int) -> Children:
        return self._position(0, 1, width)

    def expand(self, frontier: Frontier, width: int) -> Children:
        return self._position(frontier.depth, len(frontier.rows), width)

    def _position(self, position: int, count: int, width: int) -> Children:
        if position >= len(self._tokens):
            return np.zeros((count, 0), np.int64), np.zeros((count, 0))
        tokens = self._tokens[position, :width]
        probabilities = self._probabilities[position, :width]
        shape = (count, len(tokens))
        return np.broadcast_to(tokens, shape), np.broadcast_to(probabilities, shape)


class CandidateSource:
    """The children in a candidate tree, such as an n-gram trie, best first."""

    def __init__(self, candidates: CandidateTree) -> None:
        self._candidates = candidates
        # Children of one parent lie together, by falling probability; ties stay in order.
        self._order = np.lexsort((-candidates.probabilities, candidates.parents))
        counts = np.bincount(candidates.parents, minlength=len(candidates.parents) + 1)
        self._counts = counts
        self._starts = np.cumsum(counts) - counts
        self._offered = np.zeros((0, 0), np.int64)

    def root(self, width: int) -> Children:
        return self._children(np.zeros(1, np.int64), width)

    def expand(self, frontier: Frontier, width: int) -> Children:
        return self._children(self._offered[frontier.above, frontier.ranks] + 1, width)

    def _children(self, rows: NDArray[np.int64], width: int) -> Children:
        """Children of the given rows of the candidate tree, [F, K]."""
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

    def keep(
        self, depth: int, scores: NDArray[np.float64], probabilities: NDArray[np.float64]
    ) -> NDArray[np.bool_]:
        return np.ones(probabilities.shape, np.bool_)

    def expand(self, depth: int, scores: NDArray[np.float64]) -> NDArray[np.bool_]:
        return best(scores, self.frontier)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beam:
    """The `width` best paths at each of `max_depth` levels, all of them nodes."""

    width: int
    max_depth: int

    @property
    def max_nodes(self) -> int:
        return self.width * self.max_depth

    def keep(
        self, depth: int, scores: NDArray[np.float64], probabilities: NDArray[np.float64]
    ) -> NDArray[np.bool_]:
        paths = np.where(probabilities < 0.0, NO_CHILD, scores[:, None] * probabilities)
        return best(paths, self.width)

    def expand(self, depth: int, scores: NDArray[np.float64]) -> NDArray[np.bool_]:
        return np.ones(scores.shape, np.bool_)


@dataclass(frozen=True, slots=True, kw_only=True)
class EveryChild:
    """The complete tree of `width` children a node, down to `max_depth`.

    least_score  nodes of a lower path score are left out; the fixed tree of the DynaTree
                 paper has 0.1 (section 4.3)
    """

    width: int
    max_depth: int
    max_nodes: int = UNBOUNDED
    least_score: float = 0.0

    def keep(
        self, depth: int, scores: NDArray[np.float64], probabilities: NDArray[np.float64]
    ) -> NDArray[np.bool_]:
        return scores[:, None] * probabilities >= self.least_score

    def expand(self, depth: int, scores: NDArray[np.float64]) -> NDArray[np.bool_]:
        return np.ones(scores.shape, np.bool_)


def single_path(max_depth: int) -> EveryChild:
    """The growth of a chain: the most probable child at every step."""
    return EveryChild(width=1, max_depth=max_depth)


def best(scores: NDArray[np.float64], count: int) -> NDArray[np.bool_]:
    """True at the `count` largest values, the first ones among equals; any shape."""
    taken = np.zeros(scores.size, np.bool_)
    taken[np.argsort(-scores, axis=None, kind="stable")[:count]] = True
    return taken.reshape(scores.shape)
