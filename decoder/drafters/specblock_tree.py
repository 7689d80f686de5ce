"""The tree that SpecBlock's rank head shapes, block by block (Shi et al., Algorithm 2).

Position k of a block hangs below the first token of position k - 1, so that a block is a chain
with siblings. Where the paper leaves a choice open, this is what is done here:

- A position whose bucket has no branching gives up: the block's chain ends before it.
- Which tokens start a block of the next round ("selected by the rank head"): the end of a chain,
  since nothing else leads on from it, and below uncertain positions (b_1, b_2) every sibling of
  the chain's token. At a sure one (b_0) the chain is enough, at a given-up one (b_3) nothing is.
- Of these the `starts` of highest path score are taken, so that the forward stays one batch
  whatever the buckets, and of the finished tree the `nodes` of highest path score are kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from decoder.drafters.specblock_rank import BUCKETS
from decoder.tree import CandidateTree

CONCENTRATED = (2, 4, 10, 0)  # the paper's two recommendations: give up on ranks beyond ten,
FALLBACK = (2, 4, 6, 4)  # or keep four candidates there
UNIFORM_WIDTH = 3  # children everywhere without a rank head: with four starts 60 nodes too
UNCERTAIN = (1, 2)  # buckets below which siblings start a block


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGrowth:
    """How a tree of blocks grows.

    branching  children at a position of each bucket
    uncertain  buckets whose siblings may start a block
    blocks     M: forwards of the drafter
    starts     blocks in a forward but the first
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
    """Where a block begins.

    node   row of the tree, 0 the root
    depth  of that node
    score  its path score
    token  its token; the root's is not known here
    block  which block of the forward before proposed it, and at which position of 0..K - 1
    """

    node: int
    depth: int
    score: float
    token: int = -1
    block: int = -1
    position: int = -1


@dataclass(slots=True)
class BlockTree:
    """A tree as it grows; `starts` are where the next forward's blocks begin.

    depth  deepest node wanted;  width  most children of a node wanted
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
        """Add what one forward gave for all `starts`, and choose those of the next one.

        tokens, probabilities  [S, K, W] best first, W of at least the widest branching
        buckets                [S, K]
        """
        found: list[Start] = []
        for block, start in enumerate(self.starts):
            found += self._attach_block(
                block, start, tokens[block], probabilities[block], buckets[block]
            )
        found.sort(key=lambda start: -start.score)  # stable: earlier ones first among equals
        self.starts = found[: self.growth.starts]

    def candidates(self) -> CandidateTree:
        """The `nodes` nodes of highest path score; a parent's is never below its child's."""
        order = np.argsort(-np.array(self.scores), kind="stable")[: self.growth.nodes]
        kept = np.sort(order)
        row_of = np.zeros(len(self.tokens) + 1, np.int64)
        row_of[kept + 1] = np.arange(1, len(kept) + 1)
        parents = np.array(self.parents, np.int64)
        return CandidateTree(
            np.array(self.tokens, np.int64)[kept],
            row_of[parents[kept]],
            np.array(self.probabilities, np.float64)[kept],
        )

    def _attach_block(
        self,
        block: int,
        start: Start,
        tokens: NDArray[np.int64],
        probabilities: NDArray[np.float64],
        buckets: NDArray[np.int64],
    ) -> list[Start]:
        """One block below its start; the places from which a next one may go on."""
        found: list[Start] = []
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
                found += children[1:]
        if parent is not start:
            found.append(parent)
        return [place for place in found if place.depth < self.depth]

    def _count(self, bucket: int) -> int:
        return min(self.growth.branching[bucket], self.width)

    def _add(self, parent: Start, token: int, probability: float) -> int:
        """The row of a new node."""
        self.tokens.append(token)
        self.parents.append(parent.node)
        self.probabilities.append(probability)
        self.scores.append(parent.score * probability)
        return len(self.tokens)


def uniform(width: int, growth: BlockGrowth) -> BlockGrowth:
    """The tree without a rank head: `width` children everywhere, and any of them may start."""
    return replace(growth, branching=(width,) * BUCKETS, uncertain=tuple(range(BUCKETS)))
