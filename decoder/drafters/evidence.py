"""What two drafters say of the tokens behind a path, as arrays for compiled functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from decoder.jit import jit
from decoder.tree import CandidateTree, Lattice, best_first

TOKEN, PARENT, CHILD, SIBLING = range(4)  # columns of a trie, by row; -1: none
NO_TREE = CandidateTree(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
NO_LATTICE = Lattice(np.zeros((0, 0), np.int64), np.zeros((0, 0)))


@dataclass(frozen=True, slots=True)
class Evidence:
    """The candidates of both sources as arrays of one type, so that nothing compiles anew.

    trie    int64 [M + 1, 4]  the paths of both trees, row 0 the root, parents first
    says    float64 [M + 1, 2]  what each source's tree gives a row given its parent, 0: nothing
    tokens  int64 [gamma, K]  the second source's marginals, empty where it gave a tree
    shares  float64 [gamma, K]
    totals  float64 [gamma]  sums of the shares
    """

    trie: NDArray[np.int64]
    says: NDArray[np.float64]
    tokens: NDArray[np.int64]
    shares: NDArray[np.float64]
    totals: NDArray[np.float64]

    def arrays(self) -> tuple[NDArray[Any], ...]:
        """As the compiled functions take them."""
        return self.trie, self.says, self.tokens, self.shares, self.totals

    def followed(self, emitted: Sequence[int]) -> int:
        """How many of the tokens that followed the root are a path of the trie."""
        row = 0
        for count, token in enumerate(emitted):
            row = child_of(self.trie, row, token)
            if row < 0:
                return count
        return len(emitted)


def evidence_of(
    first: Lattice | CandidateTree, second: Lattice | CandidateTree | None, nodes: int
) -> Evidence:
    """The evidence of two drafts; the second is None where it was not drafted.

    A lattice from the first source is taken as the tree of its best `nodes` paths.
    """
    tree = _as_tree(first, nodes) if isinstance(first, Lattice) else first
    other, lattice = NO_TREE, NO_LATTICE
    if isinstance(second, Lattice):
        lattice = second
    elif second is not None:
        other = second
    trie, says = _merge(_arrays(tree), _arrays(other))
    tokens = np.array(lattice.tokens, dtype=np.int64, order="C")
    shares = np.array(lattice.probabilities, dtype=np.float64, order="C")
    return Evidence(trie, says, tokens, shares, _total(shares))


def _arrays(
    tree: CandidateTree,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    return (
        np.array(tree.tokens, dtype=np.int64),
        np.array(tree.parents, dtype=np.int64),
        np.array(tree.probabilities, dtype=np.float64),
    )


def _as_tree(lattice: Lattice, nodes: int) -> CandidateTree:
    paths = best_first(lattice, nodes)
    above = np.concatenate((np.ones(1), paths.scores))[paths.parents]
    given = np.divide(paths.scores, above, out=np.zeros(paths.nodes), where=above > 0.0)
    return CandidateTree(paths.tokens, paths.parents, given)


@jit
def _sound(probability):  # type: ignore[no-untyped-def]
    """A damaged drafter's probability made one: above 1 is 1, what is no number is 0."""
    return min(probability, 1.0) if probability > 0.0 else 0.0


@jit
def _total(shares):  # type: ignore[no-untyped-def]
    """Make the probabilities of a lattice sound; the sum of each position."""
    totals = np.zeros(shares.shape[0])
    for position in range(shares.shape[0]):
        for rank in range(shares.shape[1]):
            shares[position, rank] = _sound(shares[position, rank])
            totals[position] += shares[position, rank]
    return totals


@jit
def _merge(first, second):  # type: ignore[no-untyped-def]
    """The trie of two trees, and what each says of its rows."""
    room = len(first[0]) + len(second[0]) + 1
    trie = np.full((room, 4), -1, np.int64)
    says = np.zeros((room, 2), np.float64)
    size = 1
    for source in range(2):
        tokens, parents, probabilities = first if source == 0 else second
        rows = np.zeros(len(tokens) + 1, np.int64)  # of the trie, by row of the source's tree
        for node in range(len(tokens)):
            parent = rows[parents[node]]
            row = child_of(trie, parent, tokens[node])
            if row < 0:
                row = size
                trie[row, TOKEN], trie[row, PARENT] = tokens[node], parent
                trie[row, SIBLING] = trie[parent, CHILD]
                trie[parent, CHILD] = row
                size += 1
            says[row, source] = _sound(says[row, source] + _sound(probabilities[node]))
            rows[node + 1] = row
    return trie[:size], says[:size]


@jit
def child_of(trie, row, token):  # type: ignore[no-untyped-def]
    """The row of `row`'s child that carries `token`, or -1; a row of -1 has no children."""
    child = trie[row, CHILD] if row >= 0 else np.int64(-1)
    while child >= 0 and trie[child, TOKEN] != token:
        child = trie[child, SIBLING]
    return child
