"""Draft trees as arrays, and their builders.

A tree of N nodes is stored without its root (the bonus token). Row 0 of the
verification forward is the root, row i + 1 is node i; parents are row numbers.
Nodes are in best-first order, so the first n nodes are themselves the best tree
of n nodes (BASTION, proposition 2.3: the trees are nested).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodel.errors import InputError
from decoder.ancestors import visibility
from decoder.heap import sift_down, sift_up
from decoder.jit import jit


@dataclass(frozen=True, slots=True)
class DraftTree:
    """N drafted nodes below the bonus token.

    tokens   int64 [N]    token of each node
    parents  int64 [N]    row of the parent: 0 is the root, i + 1 is node i
    depths   int64 [N]    1 for children of the root
    scores   float64 [N]  path scores (BASTION eq. 1)
    """

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]
    depths: NDArray[np.int64]
    scores: NDArray[np.float64]

    @property
    def nodes(self) -> int:
        return len(self.tokens)

    @property
    def rows(self) -> int:
        """Rows of the verification forward: the nodes and the root."""
        return len(self.tokens) + 1

    @property
    def expected_committed(self) -> float:
        """1 + the sum of path scores (BASTION eq. 3, root included)."""
        return 1.0 + float(self.scores.sum())

    def first(self, nodes: int) -> DraftTree:
        """The tree of the first `nodes` nodes; prefix-closed because parents come first."""
        return DraftTree(
            self.tokens[:nodes], self.parents[:nodes], self.depths[:nodes], self.scores[:nodes]
        )

    def row_tokens(self, root: int) -> NDArray[np.int64]:  # [N + 1]
        return np.concatenate((np.array([root], dtype=np.int64), self.tokens))

    def row_depths(self) -> NDArray[np.int64]:  # [N + 1]
        return np.concatenate((np.zeros(1, dtype=np.int64), self.depths))

    def is_chain(self) -> bool:
        """True when every row's parent is the row before it (no mask but causality needed)."""
        return bool(np.array_equal(self.parents, np.arange(len(self.parents))))

    def visibility(self) -> NDArray[np.bool_]:
        """[N + 1, N + 1]: row i sees row j when j is i itself or an ancestor of i."""
        return visibility(self.parents)

    def child(self, row: int, token: int) -> int:
        """The row of `row`'s child that carries `token`, or -1."""
        hits = np.flatnonzero((self.parents == row) & (self.tokens == token))
        return int(hits[0]) + 1 if len(hits) else -1


EMPTY = DraftTree(
    np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float64)
)


@dataclass(frozen=True, slots=True)
class Lattice:
    """Position-wise marginals of a block drafter, the top K of each position.

    tokens         int64 [gamma, K]
    probabilities  float64 [gamma, K]  descending in each row; a row may sum to less than 1
    whole          tensor float32 [gamma, vocab], the drafter's softmax; None unless asked for
    """

    tokens: NDArray[np.int64]
    probabilities: NDArray[np.float64]
    whole: Any = None

    def __post_init__(self) -> None:
        if self.tokens.shape != self.probabilities.shape or self.tokens.ndim != 2:
            raise InputError(
                f"a lattice needs tokens and probabilities of one shape [gamma, K], got "
                f"{self.tokens.shape} and {self.probabilities.shape}"
            )


@dataclass(frozen=True, slots=True)
class CandidateTree:
    """Conditional candidates of a drafter that looks at paths, not positions.

    Node i hangs below row parents[i] (0 is the root); parents come before children.
    probabilities[i] is the probability of the node given its parent.
    """

    tokens: NDArray[np.int64]  # [M]
    parents: NDArray[np.int64]  # [M]
    probabilities: NDArray[np.float64]  # [M]


def best_first(
    candidates: Lattice | CandidateTree,
    nodes: int,
    depth_factors: NDArray[np.float64] | None = None,
) -> DraftTree:
    """The `nodes` candidates of highest path score, in best-first order.

    BASTION section 2.3 and Algorithm 1, with its frontier rule mended: the next
    sibling is pushed whenever there is one, the first child wherever depth < gamma.
    `depth_factors` [gamma] scales each depth's probabilities before the tree is
    built (online correction of a biased drafter). Returns fewer nodes when the
    candidates run out.
    """
    if nodes <= 0:
        return EMPTY
    if isinstance(candidates, CandidateTree):
        return _best_first_candidates(candidates, nodes, depth_factors)
    probabilities = candidates.probabilities
    if depth_factors is not None:
        # Beyond the last factor that one holds, as for candidate trees.
        depths = np.minimum(np.arange(len(probabilities)), len(depth_factors) - 1)
        probabilities = np.minimum(probabilities * depth_factors[depths, None], 1.0)
    ranks, parents, depths, scores = _best_first_lattice(
        np.ascontiguousarray(probabilities, dtype=np.float64), nodes
    )
    return DraftTree(candidates.tokens[depths - 1, ranks], parents, depths, scores)


def chain(candidates: Lattice | CandidateTree, depth: int) -> DraftTree:
    """The most probable child at every step, down to `depth`."""
    if isinstance(candidates, Lattice):
        length = min(depth, len(candidates.tokens)) if candidates.tokens.shape[1] else 0
        if length == 0:
            return EMPTY
        tokens = candidates.tokens[:length, 0]
        scores = np.cumprod(candidates.probabilities[:length, 0])
    else:
        picked = _greedy_path(candidates.parents, candidates.probabilities, depth)
        tokens = candidates.tokens[picked]
        scores = np.cumprod(candidates.probabilities[picked])
    rows = np.arange(len(tokens), dtype=np.int64)
    return DraftTree(tokens.astype(np.int64), rows, rows + 1, scores)


def _best_first_candidates(
    candidates: CandidateTree, nodes: int, depth_factors: NDArray[np.float64] | None
) -> DraftTree:
    count = len(candidates.tokens)
    factors = np.ones(1) if depth_factors is None else depth_factors
    scores, depths = _path_scores(candidates.parents, candidates.probabilities, factors)
    # Stable: at equal scores a parent stays before its child, so every prefix is a tree.
    order = np.argsort(-scores, kind="stable")[:nodes]
    row_of = np.zeros(count + 1, dtype=np.int64)
    row_of[order + 1] = np.arange(1, len(order) + 1)
    return DraftTree(
        candidates.tokens[order], row_of[candidates.parents[order]], depths[order], scores[order]
    )


@jit
def _path_scores(parents, probabilities, factors):  # type: ignore[no-untyped-def]
    count = len(parents)
    scores = np.empty(count, np.float64)
    depths = np.empty(count, np.int64)
    for node in range(count):
        parent = parents[node]
        depth = 1 if parent == 0 else depths[parent - 1] + 1
        above = 1.0 if parent == 0 else scores[parent - 1]
        factor = factors[min(depth, len(factors)) - 1]
        depths[node] = depth
        scores[node] = above * min(probabilities[node] * factor, 1.0)
    return scores, depths


@jit
def _greedy_path(parents, probabilities, depth):  # type: ignore[no-untyped-def]
    picked = np.empty(depth, np.int64)
    row = 0
    for length in range(depth):
        best = -1
        for node in range(len(parents)):
            if parents[node] == row and (best < 0 or probabilities[node] > probabilities[best]):
                best = node
        if best < 0:
            return picked[:length]
        picked[length] = best
        row = best + 1
    return picked


@jit
def _best_first_lattice(probabilities, limit):  # type: ignore[no-untyped-def]
    """Best-first enumeration of the prefix lattice with one binary heap.

    A frontier entry is a node not yet taken, kept as item -> (parent row, depth,
    rank). Taking a node replaces it by its next sibling in place (one sift down)
    and pushes its first child (one sift up).
    """
    gamma, width = probabilities.shape
    ranks = np.empty(limit, np.int64)
    parents = np.empty(limit, np.int64)
    depths = np.empty(limit, np.int64)
    scores = np.empty(limit, np.float64)
    if gamma == 0 or width == 0:
        return ranks[:0], parents[:0], depths[:0], scores[:0]
    keys = np.empty(limit + 2, np.float64)
    items = np.empty(limit + 2, np.int64)
    # Entry i: parent row, depth, rank. At most one new entry a taken node, plus siblings in place.
    entry_parent = np.empty(limit + 2, np.int64)
    entry_depth = np.empty(limit + 2, np.int64)
    entry_rank = np.empty(limit + 2, np.int64)
    entry_parent[0], entry_depth[0], entry_rank[0] = 0, 1, 0
    keys[0], items[0] = probabilities[0, 0], 0
    size, entries, taken = 1, 1, 0
    while size > 0 and taken < limit:
        score, entry = keys[0], items[0]
        parent, depth, rank = entry_parent[entry], entry_depth[entry], entry_rank[entry]
        ranks[taken], parents[taken], depths[taken] = rank, parent, depth
        scores[taken] = score
        taken += 1
        if rank + 1 < width:
            above = 1.0 if parent == 0 else scores[parent - 1]
            entry_rank[entry] = rank + 1
            keys[0] = above * probabilities[depth - 1, rank + 1]
            sift_down(keys, items, size)
        else:
            size -= 1
            keys[0], items[0] = keys[size], items[size]
            if size > 0:
                sift_down(keys, items, size)
        if depth < gamma:
            entry_parent[entries], entry_depth[entries], entry_rank[entries] = taken, depth + 1, 0
            keys[size], items[size] = score * probabilities[depth, 0], entries
            sift_up(keys, items, size)
            size += 1
            entries += 1
    return ranks[:taken], parents[:taken], depths[:taken], scores[:taken]
