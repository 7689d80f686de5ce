"""Trees against brute force over the lattice and against reference answers."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.tree.draft_tree import CandidateTree, Lattice, best_first, chain, visibility
from tests.decoder.models import paths_of, random_candidates


def lattice(marginals):
    marginals = np.asarray(marginals, dtype=np.float64)
    tokens = np.arange(marginals.size, dtype=np.int64).reshape(marginals.shape)
    return Lattice(tokens, marginals)


def all_path_scores(marginals):
    """Every prefix of the lattice with its score, by enumeration."""
    scores = []
    for depth in range(1, len(marginals) + 1):
        for path in itertools.product(*(range(len(row)) for row in marginals[:depth])):
            scores.append(np.prod([marginals[d][k] for d, k in enumerate(path)]))
    return np.sort(np.array(scores))[::-1]


@st.composite
def descending_rows(draw):
    width = draw(st.integers(1, 4))
    row = st.lists(st.floats(0.0, 1.0, width=32), min_size=width, max_size=width)
    return [sorted(one, reverse=True) for one in draw(st.lists(row, min_size=1, max_size=4))]


@given(descending_rows(), st.integers(1, 60))
@settings(max_examples=200)
def test_best_first_takes_the_largest_path_scores(marginals, nodes):
    tree = best_first(lattice(marginals), nodes)
    expected = all_path_scores(marginals)[:nodes]
    assert tree.nodes == len(expected)
    np.testing.assert_allclose(tree.scores, expected, rtol=1e-12)
    paths_of(tree)


@pytest.mark.parametrize("seed", range(20))
def test_conditional_candidates_best_first(seed):
    rng = np.random.default_rng(seed)
    candidates = random_candidates(rng, 30)
    scores = np.empty(30)
    for node in range(30):
        parent = candidates.parents[node]
        scores[node] = candidates.probabilities[node] * (1.0 if parent == 0 else scores[parent - 1])
    for nodes in (1, 5, 17, 30, 99):
        tree = best_first(candidates, nodes)
        np.testing.assert_allclose(tree.scores, np.sort(scores)[::-1][:nodes])
        paths_of(tree)


def test_certain_children_stay_behind_their_parents():
    candidates = CandidateTree(np.array([7, 8, 9]), np.array([0, 1, 2]), np.ones(3))
    tree = best_first(candidates, 2)
    assert list(tree.tokens) == [7, 8]
    paths_of(tree)


def test_chain_of_conditional_candidates_follows_the_likeliest_child():
    columns = [10, 11, 12, 13], [0, 0, 2, 2], [0.3, 0.6, 0.2, 0.5]
    tree = chain(CandidateTree(*map(np.array, columns)), 5)
    assert list(tree.tokens) == [11, 13]
    assert list(tree.scores) == [0.6, 0.3]


def test_visibility_is_ancestors_and_self():
    tree = best_first(lattice([[0.6, 0.4], [0.7, 0.3]]), 6)
    paths, visible = paths_of(tree), visibility(tree.parents)
    for row, path in enumerate(paths):
        ancestors = {paths.index(path[:length]) for length in range(len(path) + 1)}
        assert set(np.flatnonzero(visible[row])) == ancestors
