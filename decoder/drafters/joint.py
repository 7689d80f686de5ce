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
    pairs of either one.
    """
    marginals = second.marginals()
    other = NO_CANDIDATES if len(marginals.tokens) else second.as_tree(nodes)
    trie, given = _merge(_arrays(first.as_tree(nodes)), _arrays(other))
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
