"""The SpecBlock draft tree that the rank head shapes, block by block (Shi et al., Algorithm 2).

Position k of a block hangs below the first token of position k - 1, so that a block is a chain
with siblings. README.md has what the authors' public code adds to the paper.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from costmodel.statistics import Array, Bools, Ints
from decoder.tree.draft_tree import CandidateTree
from lab.papers.specblock.model import BUCKETS, TREES

CONCENTRATED = (2, 4, 10, 0)  # the paper's two recommendations: give up on ranks beyond ten,
FALLBACK = (2, 4, 6, 4)  # or keep four candidates there
UNIFORM_WIDTH = 3  # children of every node without a rank head
# The most candidates at a probability of the first: at the first position, and at the others.
FIRST_CAPS = ((0.6, 8), (0.8, 5), (0.9, 3))
CAPS = ((0.85, 3), (0.95, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGrowth:
    """The rule by which a tree of blocks grows.

    branching  children at a position of each bucket
    adaptive   whether positions with a probable first token have fewer
    blocks     M: forwards of the drafter
    beam       children of the root, and the most blocks in each forward after the second
    nodes      of the finished tree
    """

    branching: tuple[int, ...] = CONCENTRATED
    adaptive: bool = False
    blocks: int = 2
    beam: int = 10
    nodes: int = 60

    @property
    def widest(self) -> int:
        return max(*self.branching, self.beam)


PUBLISHED = BlockGrowth()  # in the paper
REPOSITORY = BlockGrowth(branching=FALLBACK, adaptive=True, nodes=90)  # in the authors' code
GROWTHS = dict(zip(TREES, (PUBLISHED, REPOSITORY), strict=True))


@dataclass(frozen=True, slots=True)
class Starts:
    """The S nodes that a round of blocks starts from; all are arrays [S].

    nodes      among all drafted ones; -1 is the root
    depths     of those nodes
    scores     their path scores
    tokens     their tokens; -1 for the root
    blocks     the block of the last forward that proposed each; -1 for the root
    positions  its position in that block, 0..K - 1
    """

    nodes: Ints
    depths: Ints
    scores: Array
    tokens: Ints
    blocks: Ints
    positions: Ints

    def __len__(self) -> int:
        return len(self.nodes)


class BlockTree:
    """A tree as it grows; `starts` are the starts of the next forward's blocks."""

    def __init__(self, growth: BlockGrowth, depth: int, width: int) -> None:
        """
        depth  of the deepest node
        width  the most children of a node in one block
        """
        self._growth, self._depth, self._width = growth, depth, width
        none = np.full(1, -1)
        self.starts = Starts(none, np.zeros(1, np.int64), np.ones(1), none, none, none)
        # All drafted nodes, parents before children; a path may be there twice.
        self._tokens = self._parents = np.zeros(0, np.int64)
        self._scores = np.zeros(0)

    def attach(self, tokens: Ints, probabilities: Array, buckets: Ints) -> None:
        """Add one forward's blocks for all `starts`, and choose the starts of the next forward.

        tokens, probabilities  [S, K, W] best first, W of at least the widest branching
        buckets                [S, K]
        """
        starts, size = self.starts, len(self._tokens)
        probabilities = np.minimum(probabilities, 1.0)  # no child before its parent
        depths = starts.depths[:, None] + 1 + np.arange(tokens.shape[1])  # [S, K]
        counts, given_up = self._counts(probabilities[:, :, 0], buckets)
        counts = np.where(depths <= self._depth, counts, 0)
        chosen = np.arange(tokens.shape[2]) < counts[:, :, None]  # [S, K, W]
        numbers = size - 1 + chosen.cumsum().reshape(chosen.shape)
        parents = np.concatenate((starts.nodes[:, None], numbers[:, :-1, 0]), axis=1)
        above = np.concatenate((starts.scores[:, None], probabilities[:, :-1, 0]), axis=1)
        scores = above.cumprod(axis=1)[:, :, None] * probabilities
        self._tokens = np.concatenate((self._tokens, tokens[chosen]))
        self._scores = np.concatenate((self._scores, scores[chosen]))
        parents = np.broadcast_to(parents[:, :, None], chosen.shape)[chosen]
        self._parents = np.concatenate((self._parents, parents))
        leads = chosen & (counts > 1)[:, :, None]
        leads[:, -1, 0] |= chosen[:, -1, 0] & ~given_up
        leads &= (depths < self._depth)[:, :, None]
        block, place, _ = np.nonzero(leads)
        following = (numbers[leads], depths[block, place], scores[leads], tokens[leads])
        order = np.argsort(-following[2], kind="stable")
        if size:
            left = (self._growth.nodes - len(self._tokens)) // tokens.shape[1]
            order = order[: min(self._growth.beam, max(1, left))]
        self.starts = Starts(*(part[order] for part in (*following, block, place)))

    def candidates(self) -> CandidateTree:
        """The paths of highest score; a parent's score is never below its child's."""
        row_of = np.zeros(len(self._tokens) + 1, np.int64)  # of drafted nodes; last is the root
        rows: dict[tuple[int, int], int] = {}  # by parent and token
        chosen: list[int] = []
        for node in np.argsort(-self._scores, kind="stable"):
            key = (int(row_of[self._parents[node]]), int(self._tokens[node]))
            if key not in rows:
                if len(rows) == self._growth.nodes:
                    break
                chosen.append(node)
                rows[key] = len(chosen)
            row_of[node] = rows[key]
        parents = np.array([parent for parent, _ in rows], np.int64)
        scores = np.concatenate((np.ones(1), self._scores[chosen]))
        given = np.divide(scores[1:], scores[parents], where=scores[parents] > 0,
                          out=np.zeros(len(chosen)))  # fmt: skip
        return CandidateTree(self._tokens[chosen], parents, given)

    def _counts(self, first: Array, buckets: Ints) -> tuple[Ints, Bools]:
        """Children at each position [S, K] by its first token's probability and bucket.

        Also whether each block has given up [S].
        """
        growth = self._growth
        counts = np.array(growth.branching, np.int64)[buckets]
        given_up = counts == 0
        if growth.adaptive:
            counts = _capped(counts, first, CAPS)
        if len(self._tokens) == 0:
            counts[:, 0] = growth.beam
            given_up[:, 0] = False
            if growth.adaptive:
                counts[:, 0] = _capped(counts[:, 0], first[:, 0], FIRST_CAPS)
        counts[np.logical_or.accumulate(given_up, axis=1)] = 1
        return np.clip(counts, 1, self._width), given_up.any(axis=1)


def _capped(counts: Ints, first: Array, caps: tuple[tuple[float, int], ...]) -> Ints:
    """Counts, at most those of the last cap whose probability is reached."""
    for least, most in caps:
        counts = np.where(first >= least, np.minimum(counts, most), counts)
    return counts


def uniform(width: int, growth: BlockGrowth) -> BlockGrowth:
    """The growth without a rank head: `width` children everywhere."""
    return replace(growth, branching=(width,) * BUCKETS, adaptive=False, beam=width)
