"""How a draft tree grows level by level, from any source of children.

A source gives the children of a few nodes; a rule says which of them become nodes
and which of those are expanded next; `grow` runs the one against the other, one
call of the source a level, so that a drafter that is a model runs one forward a
level. What a rule keeps of its own tree is the whole of it: growing again from
`CandidateSource` gives the same tree, so a policy may apply its rule to candidates
of any kind without knowing whether a drafter has applied it before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from decoder.tree import CandidateTree, Lattice

UNBOUNDED = 1 << 30
NO_CHILD = -1.0  # the probability of a place where a source has no child

Children = tuple[NDArray[np.int64], NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class Frontier:
    """F nodes of one level whose children are wanted, in the order of their rows.

    depth   of these nodes; children of the root have depth 1
    rows    int64 [F]  in the candidate tree: row 0 is the root, row i + 1 is node i
    tokens  int64 [F]
    above   int64 [F]  which row of the source's last answer each was found in,
                       that is, which node of the frontier before is its parent
    ranks   int64 [F]  and in which column
    """

    depth: int
    rows: NDArray[np.int64]
    tokens: NDArray[np.int64]
    above: NDArray[np.int64]
    ranks: NDArray[np.int64]


class LevelSource(Protocol):
    """Children of nodes, asked for level by level: first `root`, then `expand`.

    Both return tokens int64 [F, K] and probabilities float64 [F, K] given the parent,
    descending in each row, with K of at most `width` and F = 1 for the root. A
    probability that is negative or not a number marks a place without a child.
    """

    def root(self, width: int) -> Children:
        """Children of the root; starts a new tree."""

    def expand(self, frontier: Frontier, width: int) -> Children:
        """Children of the frontier's nodes, one row each."""


class Growth(Protocol):
    """Which children become nodes and which of these are expanded further."""

    @property
    def width(self) -> int:
        """Children looked at below each expanded node."""

    @property
    def max_depth(self) -> int: ...

    @property
    def max_nodes(self) -> int:
        """Nodes after which it stops, those of the last level in the order of their rows."""

    def keep(
        self, depth: int, scores: NDArray[np.float64], probabilities: NDArray[np.float64]
    ) -> NDArray[np.bool_]:
        """Which children become nodes, [F, K], for F expanded nodes at `depth` - 1.

        scores [F]  path scores of the expanded nodes
        probabilities [F, K]  of their children, descending in each row; negative where
                              there is no child, which is never kept whatever is said here
        """

    def expand(self, depth: int, scores: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Which of the nodes at `depth`, with path scores [M], are expanded further."""


def grow(source: LevelSource, growth: Growth, depth: int) -> CandidateTree:
    """The tree that `growth` makes of the source's children, at most `depth` deep.

    Nodes come level by level, within a level parent by parent and there by rank
    (breadth first), so parents come before their children.
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
        kept = growth.keep(level, scores, probabilities) & (probabilities >= 0.0)
        above, ranks = (found[: growth.max_nodes - nodes] for found in np.nonzero(kept))
        if len(above) == 0:
            break
        given = probabilities[above, ranks]
        levels.append((tokens[above, ranks], rows[above], given))
        level_scores = scores[above] * given
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


def source_of(candidates: Lattice | CandidateTree) -> LevelSource:
    """The children that a drafter's candidates hold, level by level."""
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
        # Nodes of one parent lie together, the most probable first; ties stay in order.
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
    """Every looked-at child becomes a node; the best `frontier` of a level are expanded.

    EAGLE-2 and EAGLE-3 grow their trees so, with these defaults, and then verify the
    best of all levels (SafeAILab/EAGLE, eagle/model/cnets.py): the candidates from
    which a best-first policy takes its tree. Its depth of 7 counts the expansions after
    the root's, so there are 8 levels.
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

    least_score  nodes of a lower path score are left out (the fixed tree that
                 DynaTree is compared with has 0.1; DynaTree paper, section 4.3)
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
    """The rule of a plain chain: the most probable child at every step."""
    return EveryChild(width=1, max_depth=max_depth)


def best(scores: NDArray[np.float64], count: int) -> NDArray[np.bool_]:
    """True at the `count` largest values, earlier ones first among equals; any shape."""
    taken = np.zeros(scores.size, np.bool_)
    taken[np.argsort(-scores, axis=None, kind="stable")[:count]] = True
    return taken.reshape(scores.shape)
