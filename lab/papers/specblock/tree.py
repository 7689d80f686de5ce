"""The SpecBlock draft tree that the rank head shapes, block by block (Shi et al., Algorithm 2).

Position k of a block hangs below the first token of position k - 1, so that a block is a chain
with siblings. Choices made here where the paper leaves one open:

- A position whose bucket has no branching gives up: the block's chain ends before it.
- The end of a chain starts a block of the next round: nothing else leads on from it.
- At an uncertain position (b_1, b_2) every sibling of the chain's token starts one too.
- The `starts` of highest path score are taken, so that a forward is one batch of known size.
- The `nodes` of highest path score make the finished tree.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from decoder.tree.draft_tree import CandidateTree
from lab.papers.specblock.model import BUCKETS, CONCENTRATED

UNIFORM_WIDTH = 3  # children of every node without a rank head: 60 nodes with four starts too
UNCERTAIN = (1, 2)  # buckets whose siblings may start a block


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGrowth:
    """The rule by which a tree of blocks grows.

    branching  children at a position of each bucket
    uncertain  buckets whose siblings may start a block
    blocks     M: forwards of the drafter
    starts     blocks in each forward after the first
    nodes      of the finished tree
    """

    branching: tuple[int, ...] = CONCENTRATED
    uncertain: tuple[int, ...] = UNCERTAIN
    blocks: int = 2
    starts: int = 4
    nodes: int = 60

    @property
    def widest(self) -> int:
        return max(self.branching)


@dataclass(frozen=True, slots=True)
class Start:
    """The node that a block starts from.

    node      row of the tree; 0 is the root
    depth     of that node
    score     its path score
    token     its token; -1 for the root
    block     the block of the last forward that proposed it; -1 for the root
    position  its position in that block, 0..K - 1
    """

    node: int
    depth: int
    score: float
    token: int = -1
    block: int = -1
    position: int = -1


@dataclass(slots=True)
class BlockTree:
    """A tree as it grows; `starts` are the starts of the next forward's blocks.

    depth  of the deepest node
    width  the most children of a node
    """

    growth: BlockGrowth
    depth: int
    width: int
    starts: list[Start] = field(default_factory=lambda: [Start(0, 0, 1.0)])
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    def attach(
        self,
        tokens: NDArray[np.int64],
        probabilities: NDArray[np.float64],
        buckets: NDArray[np.int64],
    ) -> None:
        """Add one forward's blocks for all `starts`, and choose the starts of the next forward.

        tokens, probabilities  [S, K, W] best first, W of at least the widest branching
        buckets                [S, K]
        """
        starts: list[Start] = []
        for block, start in enumerate(self.starts):
            starts += self._attach_block(
                block, start, tokens[block], probabilities[block], buckets[block]
            )
        starts.sort(key=lambda start: -start.score)  # stable: earlier ones first among equals
        self.starts = starts[: self.growth.starts]

    def candidates(self) -> CandidateTree:
        """The nodes of highest path score; a parent's score is never below its child's."""
        order = np.argsort(-np.array(self.scores), kind="stable")[: self.growth.nodes]
        nodes = np.sort(order)
        row_of = np.zeros(len(self.tokens) + 1, np.int64)
        row_of[nodes + 1] = np.arange(1, len(nodes) + 1)
        parents = np.array(self.parents, np.int64)
        return CandidateTree(
            np.array(self.tokens, np.int64)[nodes],
            row_of[parents[nodes]],
            np.array(self.probabilities, np.float64)[nodes],
        )

    def _attach_block(
        self,
        block: int,
        start: Start,
        tokens: NDArray[np.int64],
        probabilities: NDArray[np.float64],
        buckets: NDArray[np.int64],
    ) -> list[Start]:
        """Add one block below its start; returns the possible starts of further blocks."""
        starts: list[Start] = []
        parent = start
        for position in range(min(len(tokens), self.depth - start.depth)):
            bucket = int(buckets[position])
            children = [
                Start(
                    self._add(parent, int(token), float(probability)),
                    parent.depth + 1,
                    parent.score * float(probability),
                    int(token),
                    block,
                    position,
                )
                for token, probability in zip(
                    tokens[position, : self._count(bucket)],
                    probabilities[position, : self._count(bucket)],
                    strict=True,
                )
            ]
            if not children:
                break
            parent = children[0]
            if bucket in self.growth.uncertain:
                starts += children[1:]
        if parent is not start:
            starts.append(parent)
        return [following for following in starts if following.depth < self.depth]

    def _count(self, bucket: int) -> int:
        return min(self.growth.branching[bucket], self.width)

    def _add(self, parent: Start, token: int, probability: float) -> int:
        """Add a node; returns its row."""
        self.tokens.append(token)
        self.parents.append(parent.node)
        self.probabilities.append(probability)
        self.scores.append(parent.score * probability)
        return len(self.tokens)


def uniform(width: int, growth: BlockGrowth) -> BlockGrowth:
    """The growth without a rank head: `width` children everywhere, each of which may start."""
    return replace(growth, branching=(width,) * BUCKETS, uncertain=tuple(range(BUCKETS)))
