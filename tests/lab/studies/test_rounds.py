"""Hindsight on rounds, against trying everything."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.tree.draft_tree import Lattice, best_first
from lab.studies.controller_simulated import committed_by_size


def lattice(seed, gamma=4, width=3):
    random = np.random.default_rng(seed)
    tokens = np.stack([random.permutation(9)[:width] for _ in range(gamma)])
    shares = -np.sort(-random.dirichlet(np.ones(width + 1), gamma)[:, :width], axis=1)
    return Lattice(tokens, shares)


def committed_by_walking(candidates, truth, nodes):
    """A tree of its own for the size, and the target's walk through it, token by token."""
    tree = best_first(candidates, nodes)
    row, length = 0, 1
    for token in truth:
        below = [
            node + 1
            for node in range(tree.nodes)
            if tree.parents[node] == row and tree.tokens[node] == token
        ]
        if not below:
            break
        row, length = below[0], length + 1
    return length


@given(seed=st.integers(0, 10_000), truth=st.lists(st.integers(0, 8), max_size=6))
@settings(max_examples=150)
def test_every_size_commits_what_its_own_tree_would(seed, truth):
    candidates = lattice(seed)
    found = committed_by_size(best_first(candidates, 30), truth, 30)
    by_walking = [committed_by_walking(candidates, truth, nodes) for nodes in range(31)]
    assert found.tolist() == by_walking
