"""Candidates whose probabilities depend on the token before, and best-first trees of them.

The children of a node depend on its position and its own token only. So the edges of all
positions are computed at once, before a tree is chosen, and the tree needs no further forward.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from costmodel.statistics import Array, Bools, Ints
from decoder.jit import jit, jit_inner
from decoder.tree.draft_tree import EMPTY, Candidates, DraftTree, checked_arrays, sift_down, sift_up

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

    def checked(self) -> PairLattice:
        tokens, _ = checked_arrays(self.tokens, self.tokens, 2)
        gamma, width = tokens.shape
        first, edges = (np.asarray(part, dtype=np.float64) for part in (self.first, self.edges))
        if first.shape != (width,) or edges.shape != (max(gamma - 1, 0), width, width):
            raise ValueError(f"tokens {tokens.shape}, first {first.shape}, edges {edges.shape}")
        return PairLattice(tokens, np.ascontiguousarray(first), np.ascontiguousarray(edges))

    def sound(self, vocab: int | None = None) -> PairLattice:
        """The same without candidates outside the vocabulary, and with edges from 0 to 1."""
        unsound: Bools = self.tokens < 0
        if vocab is not None:
            unsound = unsound | (self.tokens >= vocab)
        first = _sound(self.first, np.any(unsound[:1], axis=0))
        edges = _sound(self.edges, unsound[1:, None])
        if first is self.first and edges is self.edges:
            return self
        return PairLattice(np.where(unsound, 0, self.tokens), first, edges)

    def best_first(self, nodes: int, depth_factors: Array | None = None) -> DraftTree:
        if self.tokens.size == 0:
            return EMPTY
        factors = np.ones(1) if depth_factors is None else depth_factors
        first, edges = (np.ascontiguousarray(part) for part in (self.first, self.edges))
        return DraftTree(*_best_first(self.tokens, first, edges, factors, nodes))

    def greedy(self, depth: int) -> tuple[Ints, Array]:
        gamma, width = self.tokens.shape
        tokens, scores, score = [], [], 1.0
        chances = self.first
        for position in range(min(depth, gamma) if width else 0):
            best = int(chances.argmax())
            if chances[best] < 0.0:
                break
            score *= float(chances[best])
            tokens.append(self.tokens[position, best])
            scores.append(score)
            if position + 1 < gamma:
                chances = self.edges[position, best]
        return np.array(tokens, dtype=np.int64), np.array(scores)


def _sound(chances: Array, unsound: Bools) -> Array:
    valid = (chances >= 0.0) | (chances == NO_EDGE)  # NaN compares false
    if not unsound.any() and valid.all() and chances.max(initial=0.0) <= 1.0:
        return chances
    return np.where((chances >= 0.0) & ~unsound, np.minimum(chances, 1.0), NO_EDGE)


@jit
def _best_first(tokens, first, edges, factors, limit):  # type: ignore[no-untyped-def]
    """Best-first enumeration of the paths with one binary heap.

    A frontier entry is a node that is not taken yet: its parent's row, its depth, its candidate.
    Taking a node replaces it by its next sibling in place and pushes its first child. Siblings
    are ordered when they are first needed: `following[s, b]` is the candidate that comes after b
    among the children of s, and `following[s, K]` the first one; s is a candidate's number.
    """
    gamma, width = tokens.shape
    unknown = np.int16(-2)
    following = np.full(((gamma - 1) * width + 1, width + 1), unknown, np.int16)
    taken_tokens, parents = np.empty(limit, np.int64), np.empty(limit, np.int64)
    depths, scores = np.empty(limit, np.int64), np.empty(limit, np.float64)
    chosen = np.empty(limit, np.int64)  # the candidate of each taken node
    keys, items = np.empty(limit + 2, np.float64), np.empty(limit + 2, np.int64)
    entries = np.empty((limit + 2, 3), np.int64)
    size, used, taken = 0, 0, 0
    first_bits, bits = first.view(np.int64), edges.view(np.int64)
    low = np.int64(1)
    while low < width:
        low *= 2
    low -= 1
    best = _next(first_bits, width, low)
    if best >= 0:
        entries[0, 0], entries[0, 1], entries[0, 2] = 0, 1, best
        keys[0], items[0] = min(first[best] * factors[0], 1.0), 0
        size, used = 1, 1
    while size > 0 and taken < limit:
        score, entry = keys[0], items[0]
        parent, depth, candidate = entries[entry, 0], entries[entry, 1], entries[entry, 2]
        taken_tokens[taken], parents[taken] = tokens[depth - 1, candidate], parent
        depths[taken], scores[taken], chosen[taken] = depth, score, candidate
        taken += 1
        row, state, above, before = first, (gamma - 1) * width, 1.0, 0
        if depth > 1:
            before = chosen[parent - 1]
            row, state = edges[depth - 2, before], (depth - 2) * width + before
            above = scores[parent - 1]
        sibling = following[state, candidate]
        if sibling == unknown:
            row_bits = first_bits if depth == 1 else bits[depth - 2, before]
            sibling = _next(row_bits, candidate, low)
            following[state, candidate] = sibling
        if sibling >= 0:
            entries[entry, 2] = sibling
            keys[0] = above * min(row[sibling] * factors[min(depth, len(factors)) - 1], 1.0)
            sift_down(keys, items, size)
        else:
            size -= 1
            keys[0], items[0] = keys[size], items[size]
            if size > 0:
                sift_down(keys, items, size)
        if depth < gamma:
            state = (depth - 1) * width + candidate
            row = edges[depth - 1, candidate]
            child = following[state, width]
            if child == unknown:
                child = _next(bits[depth - 1, candidate], width, low)
                following[state, width] = child
            if child >= 0:
                entries[used, 0], entries[used, 1], entries[used, 2] = taken, depth + 1, child
                factor = factors[min(depth + 1, len(factors)) - 1]
                keys[size], items[size] = score * min(row[child] * factor, 1.0), used
                sift_up(keys, items, size)
                size += 1
                used += 1
    return taken_tokens[:taken], parents[:taken], depths[:taken], scores[:taken]


@jit_inner
def _next(bits, last, low):  # type: ignore[no-untyped-def]
    """The next candidate by falling probability, then number; -1 if none; `last` = K: the first.

    Floats of 0 or more order as their bits do. The lowest bits (2^-47 of a probability for K = 32)
    give way to the candidate's number, so that one vectorised loop finds the next.

    low  2^n - 1, at least K - 1
    """
    limit = np.iinfo(np.int64).max
    if last < len(bits):
        limit = (bits[last] & ~low) | (low - last)
    highest = np.int64(-1)
    for candidate in range(len(bits)):
        key = (bits[candidate] & ~low) | (low - candidate)
        highest = max(highest, key if key < limit else np.int64(-1))
    return low - (highest & low) if highest >= 0 else np.int64(-1)
