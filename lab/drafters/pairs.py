"""Candidates whose probabilities depend on the token before.

The children of a node depend on its position and its own token only. So the edges of all
positions are computed at once, before a tree is chosen, and the tree needs no further forward.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from costmodel.statistics import Array, Bools, Ints
from decoder.tree.draft_tree import EMPTY, Candidates, DraftTree, checked_arrays, tree_by_position

NO_EDGE = -1.0  # the probability of a candidate that may not follow


@dataclass(frozen=True, slots=True)
class PairLattice(Candidates):
    """K candidates for each position, and the probability of each behind each one before it.

    tokens  int64 [gamma, K]            in any order
    first   float64 [K]                 of the candidates of position 1
    edges   float64 [gamma - 1, K, K]   edges[d, a, b]: of candidate b of position d + 2 behind
                                        candidate a of position d + 1

    The probabilities behind one candidate may sum to less than 1; a negative one marks a
    candidate that may not follow.
    """

    tokens: Ints
    first: Array
    edges: Array

    def sound(self, vocab: int | None = None) -> PairLattice:
        """The same without candidates outside the vocabulary, and with edges from 0 to 1."""
        tokens, _ = checked_arrays(self.tokens, self.tokens, 2)
        gamma, width = tokens.shape
        first, edges = (np.asarray(part, dtype=np.float64) for part in (self.first, self.edges))
        if first.shape != (width,) or edges.shape != (max(gamma - 1, 0), width, width):
            raise ValueError(f"tokens {tokens.shape}, first {first.shape}, edges {edges.shape}")
        unsound: Bools = tokens < 0
        if vocab is not None:
            unsound = unsound | (tokens >= vocab)
        first = _sound(first, np.any(unsound[:1], axis=0))
        return PairLattice(np.where(unsound, 0, tokens), first, _sound(edges, unsound[1:, None]))

    def best_first(self, nodes: int, depth_factors: Array | None = None) -> DraftTree:
        if self.tokens.size == 0:
            return EMPTY
        chances = np.concatenate((self.first[None], self.edges.reshape(-1, len(self.first))))
        return tree_by_position(self.tokens, chances, depth_factors, nodes, paired=True)

    def greedy(self, depth: int) -> tuple[Ints, Array]:
        gamma, width = self.tokens.shape
        picked: list[int] = []
        given: list[float] = []
        chances = self.first
        while len(picked) < min(depth, gamma) and width and chances.max() >= 0.0:
            picked.append(int(chances.argmax()))
            given.append(float(chances[picked[-1]]))
            if len(picked) < gamma:
                chances = self.edges[len(picked) - 1, picked[-1]]
        return self.tokens[range(len(picked)), picked], np.array(given).cumprod()


def _sound(chances: Array, unsound: Bools) -> Array:
    valid = (chances >= 0.0) | (chances == NO_EDGE)  # NaN compares false
    if not unsound.any() and valid.all() and chances.max(initial=0.0) <= 1.0:
        return chances
    return np.where((chances >= 0.0) & ~unsound, np.minimum(chances, 1.0), NO_EDGE)
