"""Draft trees as arrays: candidates, best-first trees under a node budget, and masks.

A tree of N nodes is stored without its root (the bonus token). Row 0 of the verification
forward is the root, row i + 1 is node i; parents are row numbers. Nodes are in best-first
order, so the first n nodes are the best tree of n nodes (BASTION, proposition 2.3).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodel.errors import InputError
from costmodel.statistics import Array, Bools, Ints
from decoder.jit import jit, jit_inner

WORD = 32  # rows in one word of a bit mask
UNKNOWN = -2  # the next candidate before it is looked for


@dataclass(frozen=True, slots=True)
class DraftTree:
    """N drafted nodes below the bonus token.

    tokens   int64 [N]    token of each node
    parents  int64 [N]    row of the parent: 0 is the root, i + 1 is node i
    depths   int64 [N]    1 for children of the root
    scores   float64 [N]  path scores (BASTION eq. 1)
    """

    tokens: Ints
    parents: Ints
    depths: Ints
    scores: Array

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

    def row_tokens(self, root: int) -> Ints:  # [N + 1]
        return np.concatenate((np.array([root], dtype=np.int64), self.tokens))

    def row_depths(self) -> Ints:  # [N + 1]
        return np.concatenate((np.zeros(1, dtype=np.int64), self.depths))

    def child(self, row: int, token: int) -> int:
        """The row of the child of `row` with this token, or -1."""
        hits = np.flatnonzero((self.parents == row) & (self.tokens == token))
        return int(hits[0]) + 1 if len(hits) else -1


NOTHING = np.zeros(0, np.int64)
EMPTY = DraftTree(NOTHING, NOTHING, NOTHING, np.zeros(0))


class Candidates(ABC):
    """Tokens that may come next, with probabilities; each kind says how its trees are built."""

    __slots__ = ()

    @abstractmethod
    def sound(self, vocab: int | None = None) -> Candidates:
        """The candidates with a token from 0 on, below `vocab`, and a probability of 0 or more.

        Probabilities above 1, infinity included, become 1. Sound candidates keep their arrays.
        Raises ValueError or TypeError for arrays of the wrong kinds.
        """

    @abstractmethod
    def best_first(self, nodes: int, depth_factors: Array | None = None) -> DraftTree:
        """The tree of the function `best_first`, of one node or more."""

    @abstractmethod
    def greedy(self, depth: int) -> tuple[Ints, Array]:
        """Tokens and path scores of the most probable child at every step, down to `depth`."""

    def as_tree(self, nodes: int) -> CandidateTree:
        """The best `nodes` paths, each node with its probability given its parent."""
        paths = self.best_first(nodes)
        above = np.concatenate((np.ones(1), paths.scores))[paths.parents]
        given = np.divide(paths.scores, above, out=np.zeros(paths.nodes), where=above > 0.0)
        return CandidateTree(paths.tokens, paths.parents, given)


@dataclass(frozen=True, slots=True)
class Lattice(Candidates):
    """Candidates of a block drafter: the top K tokens of each position, by their marginals.

    tokens         int64 [gamma, K]
    probabilities  float64 [gamma, K]  descending in each row; a row may sum to less than 1
    whole          tensor float32 [gamma, vocab], the drafter's softmax; None unless requested
    """

    tokens: Ints
    probabilities: Array
    whole: Any = None

    def sound(self, vocab: int | None = None) -> Lattice:
        """Positions before the first without a sound candidate; K is the least count of these."""
        tokens, probabilities = checked_arrays(self.tokens, self.probabilities, 2)
        mask = _sound(tokens, probabilities, vocab)
        if mask is None:
            return Lattice(tokens, probabilities, self.whole)
        counts = mask.sum(axis=1)
        without = np.flatnonzero(counts == 0)
        depth = int(without[0]) if len(without) else len(counts)
        width = int(counts[:depth].min(initial=tokens.shape[1]))
        # Sound candidates first, by falling probability; equals stay in their order.
        capped = np.where(mask, np.minimum(probabilities, 1.0), -1.0)[:depth]
        order = np.argsort(-capped, axis=1, kind="stable")[:, :width]
        return Lattice(
            np.take_along_axis(tokens[:depth], order, axis=1),
            np.take_along_axis(capped, order, axis=1),
            self.whole if self.whole is None else self.whole[:depth],
        )

    def best_first(self, nodes: int, depth_factors: Array | None = None) -> DraftTree:
        if self.tokens.size == 0:
            return EMPTY
        return tree_by_position(self.tokens, self.probabilities, depth_factors, nodes)

    def greedy(self, depth: int) -> tuple[Ints, Array]:
        return self.tokens[:depth, :1].ravel(), self.probabilities[:depth, :1].ravel().cumprod()


@dataclass(frozen=True, slots=True)
class CandidateTree(Candidates):
    """Candidates of a drafter that looks at paths: M nodes, parents before their children.

    tokens         int64 [M]
    parents        int64 [M]  row of the parent: 0 is the root, i + 1 is node i
    probabilities  float64 [M]  of the node given its parent
    """

    tokens: Ints
    parents: Ints
    probabilities: Array

    def sound(self, vocab: int | None = None) -> CandidateTree:
        """The nodes whose whole path is sound."""
        tokens, probabilities = checked_arrays(self.tokens, self.probabilities, 1)
        parents = checked_parents(self.parents, len(tokens))
        mask = _sound(tokens, probabilities, vocab)
        if mask is None:
            return CandidateTree(tokens, parents, probabilities)
        nodes, rows = rooted(parents, mask)
        return CandidateTree(
            tokens[nodes], rows[parents[nodes]], np.minimum(probabilities[nodes], 1.0)
        )

    def best_first(self, nodes: int, depth_factors: Array | None = None) -> DraftTree:
        factors = np.ones(1) if depth_factors is None else depth_factors
        scores, depths = _path_scores(self.parents, self.probabilities, factors)
        # Stable: at equal scores a parent stays before its child, so every prefix is a tree.
        order = np.argsort(-scores, kind="stable")[:nodes]
        row_of = np.zeros(len(scores) + 1, dtype=np.int64)
        row_of[order + 1] = np.arange(1, len(order) + 1)
        parents = row_of[self.parents[order]]
        return DraftTree(self.tokens[order], parents, depths[order], scores[order])

    def greedy(self, depth: int) -> tuple[Ints, Array]:
        picked: list[int] = []
        while len(picked) < depth:
            row = picked[-1] + 1 if picked else 0
            below = np.flatnonzero(self.parents == row)
            if not len(below):
                break
            picked.append(int(below[self.probabilities[below].argmax()]))
        scores: Array = self.probabilities[picked].cumprod()
        return self.tokens[picked], scores

    def as_tree(self, nodes: int) -> CandidateTree:
        return self


NO_CANDIDATES = CandidateTree(NOTHING, NOTHING, np.zeros(0))


def best_first(candidates: Candidates, nodes: int, depth_factors: Array | None = None) -> DraftTree:
    """The `nodes` candidates of highest path score, in best-first order.

    BASTION section 2.3 and Algorithm 1, with a corrected frontier rule: the next sibling is
    pushed if there is one, the first child if depth < gamma. `depth_factors` scale the
    probabilities of each depth, the last one those of all deeper ones too (online correction of
    a biased drafter). There are fewer nodes if the candidates run out.
    """
    return candidates.best_first(nodes, depth_factors) if nodes > 0 else EMPTY


def chain(candidates: Candidates, depth: int) -> DraftTree:
    """The most probable child at every step, down to `depth`."""
    tokens, scores = candidates.greedy(depth)
    rows = np.arange(len(tokens), dtype=np.int64)
    return DraftTree(tokens.astype(np.int64), rows, rows + 1, scores)


def rooted(parents: Ints, mask: Bools) -> tuple[Ints, Ints]:
    """The nodes whose whole path is in the mask [N], and the row of each old row among theirs."""
    kept = np.ones(len(mask) + 1, dtype=np.bool_)  # with the root
    for node, parent in enumerate(parents):
        kept[node + 1] = mask[node] and kept[parent]
    return np.flatnonzero(kept[1:]), np.cumsum(kept) - 1


def checked_arrays(tokens: Any, probabilities: Any, axes: int) -> tuple[Ints, Array]:
    """Both as arrays of one shape and this number of axes. Raises ValueError or TypeError."""
    ids, chances = np.asarray(tokens), np.asarray(probabilities)
    if ids.shape != chances.shape or ids.ndim != axes:
        raise ValueError(f"tokens {ids.shape} and probabilities {chances.shape} do not fit")
    if ids.size and ids.dtype.kind not in "iu":
        raise ValueError(f"tokens must be whole numbers, not {ids.dtype}")
    return ids.astype(np.int64, copy=False), chances.astype(np.float64, copy=False)


def checked_parents(parents: Any, nodes: int) -> Ints:
    """The parents' rows of so many nodes. Raises ValueError."""
    rows = np.asarray(parents)
    if rows.shape != (nodes,) or (nodes and rows.dtype.kind not in "iu"):
        raise ValueError(f"parents must be {nodes} row numbers")
    if ((rows < 0) | (rows > np.arange(nodes))).any():
        raise ValueError("a parent must be a row before its child")
    return rows.astype(np.int64, copy=False)


def _sound(tokens: Ints, probabilities: Array, vocab: int | None) -> Bools | None:
    mask = (probabilities >= 0.0) & (tokens >= 0)  # NaN compares false
    if vocab is not None:
        mask &= tokens < vocab
    return None if mask.all() and (probabilities <= 1.0).all() else mask


@jit
def _path_scores(parents, probabilities, factors):  # type: ignore[no-untyped-def]
    scores, depths = np.empty(len(parents), np.float64), np.empty(len(parents), np.int64)
    for node in range(len(parents)):
        parent = parents[node]
        depth = 1 if parent == 0 else depths[parent - 1] + 1
        above = 1.0 if parent == 0 else scores[parent - 1]
        factor = factors[min(depth, len(factors)) - 1]
        depths[node] = depth
        scores[node] = above * min(probabilities[node] * factor, 1.0)
    return scores, depths


@jit_inner
def sift_down(keys, items, size):  # type: ignore[no-untyped-def]
    """Restore a heap (keys, items [size]; the largest key on top) after its top has changed."""
    hole, key, item = 0, keys[0], items[0]
    while True:
        below = 2 * hole + 1
        if below >= size:
            break
        if below + 1 < size and keys[below + 1] > keys[below]:
            below += 1
        if keys[below] <= key:
            break
        keys[hole], items[hole] = keys[below], items[below]
        hole = below
    keys[hole], items[hole] = key, item


@jit_inner
def sift_up(keys, items, hole):  # type: ignore[no-untyped-def]
    """Restore a heap after an entry was added at `hole`, its end."""
    key, item = keys[hole], items[hole]
    while hole > 0:
        above = (hole - 1) // 2
        if keys[above] >= key:
            break
        keys[hole], items[hole] = keys[above], items[above]
        hole = above
    keys[hole], items[hole] = key, item


def tree_by_position(
    tokens: Ints, chances: Array, depth_factors: Array | None, nodes: int, *, paired: bool = False
) -> DraftTree:
    """The best-first tree of candidates by position, whose probabilities may depend on the last.

    tokens   int64 [gamma, K]
    chances  float64 [gamma, K]: of the candidates of each position, descending. Paired, in any
             order, [1 + (gamma - 1) * K, K]: of those of the first position, and then of those
             behind each candidate, by position. A negative one may not follow
    """
    factors = np.ones(1) if depth_factors is None else depth_factors
    chances = np.ascontiguousarray(chances, dtype=np.float64)
    numbers, parents, depths, scores = _best_paths(chances, len(tokens), factors, nodes, paired)
    return DraftTree(tokens[depths - 1, numbers], parents, depths, scores)


@jit
def _best_paths(chances, gamma, factors, limit, paired):  # type: ignore[no-untyped-def]
    """Best-first enumeration of the paths with one binary heap.

    A frontier entry is a node that is not taken yet: its parent's row, its depth, its candidate,
    and the row of the chances that it is in.
    Taking a node replaces it by its next sibling in place (one sift down) and pushes its first
    child (one sift up). Siblings that are not in order are ordered when they are first needed:
    `following[s, b]` is the candidate that comes after b in row s of the chances, and
    `following[s, K]` the first one.
    """
    width = chances.shape[1]
    last_state = width - 1 if paired else 0  # of a position
    following = np.full((len(chances) if paired else 0, width + 1), UNKNOWN, np.int16)
    chosen, parents = np.empty(limit, np.int64), np.empty(limit, np.int64)
    depths, scores = np.empty(limit, np.int64), np.empty(limit, np.float64)
    keys, items = np.empty(limit + 2, np.float64), np.empty(limit + 2, np.int64)
    entries = np.empty((limit + 2, 4), np.int64)
    size, used, taken = 0, 0, 0
    best = _next(chances, following, 0, width)
    if best >= 0:
        entries[0] = 0, 1, best, 0
        keys[0], items[0] = min(chances[0, best] * factors[0], 1.0), 0
        size, used = 1, 1
    while size > 0 and taken < limit:
        score, entry = keys[0], items[0]
        parent, depth, candidate, state = entries[entry]
        chosen[taken], parents[taken] = candidate, parent
        depths[taken], scores[taken] = depth, score
        taken += 1
        sibling = _next(chances, following, state, candidate)
        if sibling >= 0:
            entries[entry, 2] = sibling
            factor = factors[min(depth, len(factors)) - 1]
            above = scores[parent - 1] if parent > 0 else 1.0
            keys[0] = above * min(chances[state, sibling] * factor, 1.0)
            sift_down(keys, items, size)
        else:
            size -= 1
            keys[0], items[0] = keys[size], items[size]
            if size > 0:
                sift_down(keys, items, size)
        if depth < gamma:
            state = 1 + (depth - 1) * (last_state + 1) + min(candidate, last_state)
            child = _next(chances, following, state, width)
            if child >= 0:
                entries[used] = taken, depth + 1, child, state
                factor = factors[min(depth + 1, len(factors)) - 1]
                keys[size], items[size] = score * min(chances[state, child] * factor, 1.0), used
                sift_up(keys, items, size)
                size += 1
                used += 1
    return chosen[:taken], parents[:taken], depths[:taken], scores[:taken]


@jit_inner
def _next(chances, following, state, last):  # type: ignore[no-untyped-def]
    """The next candidate by falling probability, then number; -1 if none; `last` = K: the first.

    Floats of 0 or more order as their bits do. The lowest bits (2^-47 of a probability for K = 32)
    give way to the candidate's number, so that one vectorised loop finds the next.
    """
    width = chances.shape[1]
    if len(following) == 0:  # they are in order
        place = last + 1 if last < width else 0
        return place if place < width and chances[state, place] >= 0.0 else -1
    if following[state, last] == UNKNOWN:
        low = np.int64(1)
        while low < width:
            low *= 2
        low -= 1
        bits, limit = chances[state].view(np.int64), np.iinfo(np.int64).max
        if last < width:
            limit = (bits[last] & ~low) | (low - last)
        highest = np.int64(-1)
        for candidate in range(width):
            key = (bits[candidate] & ~low) | (low - candidate)
            highest = max(highest, key if key < limit else np.int64(-1))
        following[state, last] = low - (highest & low) if highest >= 0 else -1
    return np.int64(following[state, last])


@jit
def visibility(parents):  # type: ignore[no-untyped-def]
    """Boolean [N + 1, N + 1]: row i sees row j, itself or an ancestor; parents [N] are rows."""
    rows = len(parents) + 1
    visible = np.zeros((rows, rows), np.bool_)
    visible[0, 0] = True
    for row in range(1, rows):
        for above in range(parents[row - 1] + 1):
            visible[row, above] = visible[parents[row - 1], above]
        visible[row, row] = True
    return visible


def pack_bits(visible: Bools, words: int) -> NDArray[np.int32]:
    """A visibility [rows, keys] as a bit mask [rows, words]: key j is bit j % 32 of word j // 32.

    Raises InputError if the words cannot hold the keys.
    """
    rows, keys = visible.shape
    if words * WORD < keys:
        raise InputError(f"{words} words of {WORD} bits cannot hold {keys} keys")
    padded = np.zeros((rows, words * WORD), dtype=np.bool_)
    padded[:, :keys] = visible
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)
