"""The candidates of two drafters joined in one trie of paths."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from costmodel.statistics import Array, Ints
from decoder.jit import jit, jit_inner
from decoder.tree.draft_tree import NO_CANDIDATES, Candidates, CandidateTree

TOKEN, CHILD, SIBLING = range(3)  # columns of a trie, by row; -1: none


class JointDraft(NamedTuple):
    """The candidates of two drafters as arrays, of the same types whatever they drafted.

    trie    int64 [M + 1, 3]    the paths of both trees; row 0 is the root, parents come first
    given   float64 [M + 1, 2]  probability of a row given its parent in each drafter's tree; 0
                                where the tree lacks it
    tokens  int64 [gamma, K]    the second drafter's marginals; empty where it gave a tree
    shares  float64 [gamma, K]  their probabilities
    totals  float64 [gamma]     sums of these by position
    """

    trie: Ints
    given: Array
    tokens: Ints
    shares: Array
    totals: Array


def join_drafts(first: Candidates, second: Candidates, nodes: int) -> JointDraft:
    """The joint draft of two drafters' sound candidates.

    A lattice of the first drafter counts as the tree of its best `nodes` paths, and so do the
    pairs of either one. The second one's pairs go on behind the first one's paths.
    """
    marginals, (tokens, edges) = second.marginals(), second.pairs()
    other = NO_CANDIDATES if len(marginals.tokens) else second.as_tree(nodes)
    trie, given = _merge(_arrays(first.as_tree(nodes)), _arrays(other))
    if len(tokens):
        trie, given = _graft(trie, given, tokens, edges, nodes)
    places = np.array(marginals.tokens, dtype=np.int64, order="C")
    shares = np.array(marginals.probabilities, dtype=np.float64, order="C")
    return JointDraft(trie, given, places, shares, shares.sum(axis=1))


def _arrays(tree: CandidateTree) -> tuple[Ints, Ints, Array]:
    return (
        np.array(tree.tokens, dtype=np.int64),
        np.array(tree.parents, dtype=np.int64),
        np.array(tree.probabilities, dtype=np.float64),
    )


@jit
def _merge(first, second):  # type: ignore[no-untyped-def]
    """The trie of two trees, and each tree's probability of its rows."""
    room = len(first[0]) + len(second[0]) + 1
    trie = np.full((room, 3), -1, np.int64)
    given = np.zeros((room, 2), np.float64)
    size = 1
    for drafter in range(2):
        tokens, parents, probabilities = first if drafter == 0 else second
        rows = np.zeros(len(tokens) + 1, np.int64)  # of the trie, by row of the drafter's tree
        for node in range(len(tokens)):
            parent = rows[parents[node]]
            row = child_of(trie, parent, tokens[node])
            if row < 0:
                row = size
                trie[row, TOKEN], trie[row, SIBLING] = tokens[node], trie[parent, CHILD]
                trie[parent, CHILD] = row
                size += 1
            given[row, drafter] = min(given[row, drafter] + probabilities[node], 1.0)
            rows[node + 1] = row
    return trie[:size], given[:size]


@jit
def _graft(trie, given, tokens, edges, most):  # type: ignore[no-untyped-def]
    """The trie with the second drafter's pairs behind paths of the first one that its tree lacks.

    Behind such a path it gives its probability to each child there is, and to its two best ones;
    behind those, to the best one at every step. `most` rows are added at most.
    """
    old, size, gamma = len(trie), len(trie), len(tokens)
    grown = np.full((old + most, 3), -1, np.int64)
    shares = np.zeros((old + most, 2), np.float64)
    left = np.empty(tokens.shape[1], np.float64)
    for row in range(old):
        for column in range(3):
            grown[row, column] = trie[row, column]
        shares[row, 0], shares[row, 1] = given[row, 0], given[row, 1]
    depths = np.zeros(old + most, np.int64)
    row = 0
    while row < size:
        depth, drafted, child = depths[row], False, grown[row, CHILD]
        while child >= 0:
            depths[child] = depth + 1
            drafted |= shares[child, 1] > 0.0
            child = grown[child, SIBLING]
        behind = -1
        if 0 < depth < gamma and not drafted and (row >= old or shares[row, 0] > 0.0):
            behind = _place(tokens[depth - 1], grown[row, TOKEN])
        if behind >= 0:
            for place in range(len(left)):
                left[place] = edges[depth - 1, behind, place]
            child = grown[row, CHILD]
            while child >= 0:
                place = _place(tokens[depth], grown[child, TOKEN])
                if place >= 0:
                    shares[child, 1] = max(left[place], 0.0)
                child = grown[child, SIBLING]
            for _ in range(2 if row < old else 1):
                place = 0
                for other in range(1, len(left)):
                    place = other if left[other] > left[place] else place
                new = child_of(grown, row, tokens[depth, place]) < 0
                if left[place] > 0.0 and new and size < old + most:
                    grown[size, TOKEN], grown[size, SIBLING] = (
                        tokens[depth, place],
                        grown[row, CHILD],
                    )
                    grown[row, CHILD], depths[size], shares[size, 1] = size, depth + 1, left[place]
                    size += 1
                left[place] = -1.0
        row += 1
    return grown[:size], shares[:size]


@jit_inner
def _place(tokens, token):  # type: ignore[no-untyped-def]
    """The first place of a token among some, or -1."""
    for place in range(len(tokens)):
        if tokens[place] == token:
            return place
    return -1


@jit_inner
def first_child(trie, row):  # type: ignore[no-untyped-def]
    """The first child of a row, or -1; a row of -1 has none."""
    return trie[row, CHILD] if row >= 0 else np.int64(-1)


@jit_inner
def child_of(trie, row, token):  # type: ignore[no-untyped-def]
    """The row of `row`'s child that carries `token`, or -1."""
    child = first_child(trie, row)
    while child >= 0 and trie[child, TOKEN] != token:
        child = trie[child, SIBLING]
    return child
