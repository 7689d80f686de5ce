"""Best-first search for the paths of highest probability under the mixture of two drafters."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from decoder.drafters.ensemble.mixture import (
    CHILD,
    SIBLING,
    TOKEN,
    JointDraft,
    child_of,
    first_probability,
    mixture_behind,
    mixture_probability,
    second_probability,
)
from decoder.jit import jit
from decoder.tree.draft_tree import CandidateTree, sift_down, sift_up

StatisticsArrays = tuple[
    NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]
]

# Columns of a frontier entry, and of a node of the tree. RANK: where the entry stands for a token
# of the marginals and for those after it; SINGLE where it is one child.
ABOVE, DRAFTED, ROW, ON_BEST, RANK, DEPTH = range(6)
SINGLE = -1


def best_paths(
    joint: JointDraft, statistics: StatisticsArrays, factors: NDArray[np.float64], nodes: int
) -> tuple[CandidateTree, float]:
    """The `nodes` paths of highest score, and the sum of their scores.

    statistics  the arrays of `EnsembleStatistics`
    factors     [3] of the mixture's weights in this text, from `TextWeights`
    Nodes come in the order of their scores, so parents come before their children.
    """
    tree, given, expected = _search(joint.arrays(), (statistics, factors), nodes)
    return CandidateTree(tree[0], tree[1], given), expected


@jit
def _search(joint, learnt, limit):  # type: ignore[no-untyped-def]
    """Best-first search of the trie, with the marginals' children behind every path."""
    nodes = np.zeros((limit + 1, 6), np.int64)  # row 0 is the root
    nodes[0, ON_BEST] = 1
    scores, given = np.ones(limit + 1), np.ones(limit + 1)
    # A row of the trie is listed once; of the marginals each path adds the best and the others.
    room = len(joint[0]) + 2 * limit + 4
    keys, items = np.empty(room, np.float64), np.empty(room, np.int64)
    entries = np.empty((room, 6), np.int64)
    chances = np.empty((room, 2), np.float64)  # given the parent; the factor of its siblings
    size, used, taken = 0, 0, 0
    while taken < limit:
        first = used
        used = _expand(taken, nodes, joint, learnt, (entries, chances), used)
        for entry in range(first, used):
            keys[size], items[size] = scores[taken] * chances[entry, 0], entry
            sift_up(keys, items, size)
            size += 1
        if size == 0:
            break
        taken += 1
        entry = items[0]
        nodes[taken] = entries[entry]
        scores[taken], given[taken] = keys[0], chances[entry, 0]
        if _next_sibling(entries[entry], chances[entry], nodes, joint):
            keys[0] = scores[nodes[taken, ABOVE]] * chances[entry, 0]
        else:
            size -= 1
            keys[0], items[0] = keys[size], items[size]
        if size > 0:
            sift_down(keys, items, size)
    tree = np.stack((nodes[1 : taken + 1, DRAFTED], nodes[1 : taken + 1, ABOVE]))
    return tree, given[1 : taken + 1].copy(), scores[1 : taken + 1].sum()


@jit
def _expand(parent, nodes, joint, learnt, listed, used):  # type: ignore[no-untyped-def]
    """List the children of a node behind the `used` entries; the new number of entries."""
    trie, _, tokens, shares, _ = joint
    row, position, on_best = nodes[parent, ROW], nodes[parent, DEPTH], nodes[parent, ON_BEST] > 0
    mixture = mixture_behind(row, position, on_best, joint, learnt)
    entries, chances = listed
    child = trie[row, CHILD] if row >= 0 else np.int64(-1)
    while child >= 0:
        token = trie[child, TOKEN]
        q, is_best = second_probability(token, child, position, joint, mixture)
        chance = mixture_probability(first_probability(child, joint, mixture), q, mixture)
        if chance > 0.0:
            _list(entries[used], parent, token, position)
            entries[used, ROW], entries[used, ON_BEST] = child, 1 if on_best and is_best else 0
            chances[used, 0] = chance
            used += 1
        child = trie[child, SIBLING]
    for rank in range(2 if position < tokens.shape[0] else 0):
        if rank == 1:
            rank = _unlisted(1, position, row, joint)
        elif child_of(trie, row, tokens[position, 0]) >= 0:
            continue
        if rank >= tokens.shape[1]:
            continue
        calibration = mixture.best_second if rank == 0 else mixture.rest_second
        factor = mixture.scale * mixture.weight_second * calibration
        if factor * shares[position, rank] > 0.0:
            _list(entries[used], parent, tokens[position, rank], position)
            entries[used, ON_BEST] = 1 if on_best and rank == 0 else 0
            entries[used, RANK] = SINGLE if rank == 0 else rank
            chances[used, 0], chances[used, 1] = factor * shares[position, rank], factor
            used += 1
    return used


@jit
def _list(entry, parent, token, position):  # type: ignore[no-untyped-def]
    """Fill an entry with one child that has no row of the trie."""
    entry[ABOVE], entry[DRAFTED], entry[ROW] = parent, token, -1
    entry[ON_BEST], entry[RANK], entry[DEPTH] = 0, SINGLE, position + 1


@jit
def _next_sibling(entry, chance, nodes, joint):  # type: ignore[no-untyped-def]
    """Move an entry of the marginals to its next token; False where there is none."""
    if entry[RANK] == SINGLE:
        return False
    _, _, tokens, shares, _ = joint
    position = entry[DEPTH] - 1
    rank = _unlisted(entry[RANK] + 1, position, nodes[entry[ABOVE], ROW], joint)
    if rank >= tokens.shape[1] or not shares[position, rank] > 0.0:
        return False
    entry[RANK], entry[DRAFTED] = rank, tokens[position, rank]
    chance[0] = chance[1] * shares[position, rank]
    return True


@jit
def _unlisted(rank, position, row, joint):  # type: ignore[no-untyped-def]
    """The first rank from `rank` on whose token is no child of `row` in the trie."""
    trie, _, tokens, _, _ = joint
    while rank < tokens.shape[1] and child_of(trie, row, tokens[position, rank]) >= 0:
        rank += 1
    return rank
