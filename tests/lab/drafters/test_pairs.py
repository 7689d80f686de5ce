"""Trees of pairwise scores against brute force over all paths, and against the lattice's heap."""

import itertools

import numpy as np
import pytest

from decoder.tree.draft_tree import Lattice, best_first, chain
from lab.drafters.conditional import NO_EDGE, PairLattice
from tests.decoder.models import paths_of


def random_pairs(rng, gamma, width):
    """Sub-stochastic rows, with ties and with candidates that may not follow."""
    rows = rng.dirichlet(np.full(width + 1, 0.4), size=1 + (gamma - 1) * width)[:, :width]
    rows[rng.random(rows.shape) < 0.1] = NO_EDGE
    rows = np.where(rng.random(rows.shape) < 0.3, np.round(rows, 1), rows)
    tokens = np.argsort(rng.random((gamma, 50)), axis=1)[:, :width]
    return PairLattice(tokens, rows[0], rows[1:].reshape(gamma - 1, width, width))


def all_paths(pairs, factors):
    """Path score by path of tokens, by enumeration."""
    gamma, width = pairs.tokens.shape
    scores = {}
    for depth in range(1, gamma + 1):
        for path in itertools.product(range(width), repeat=depth):
            score, row = 1.0, pairs.first
            for position, candidate in enumerate(path):
                chance = row[candidate]
                score = -1.0 if chance < 0.0 else score * min(chance * factors[position], 1.0)
                if score < 0.0:
                    break
                if position + 1 < gamma:
                    row = pairs.edges[position, candidate]
            if score >= 0.0:
                scores[tuple(pairs.tokens[range(depth), path].tolist())] = score
    return scores


def test_the_best_paths_of_all():
    rng = np.random.default_rng(0)
    for case in range(1000):
        gamma, width = (4, 4) if case % 10 == 0 else rng.integers(1, 4, 2)
        pairs = random_pairs(rng, gamma, width)
        factors = np.ones(gamma) if case % 3 else rng.uniform(0.5, 1.5, gamma)
        expected = all_paths(pairs, factors)
        nodes = int(rng.integers(1, 2 * len(expected) + 2))
        tree = best_first(pairs, nodes, None if case % 3 else factors)
        best = np.sort(list(expected.values()))[::-1][:nodes]
        np.testing.assert_allclose(tree.scores, best, rtol=1e-12)
        found = [expected[path] for path in paths_of(tree)[1:]]
        np.testing.assert_allclose(found, tree.scores, rtol=1e-12)
        smaller = best_first(pairs, nodes // 2, None if case % 3 else factors)
        assert paths_of(smaller) == paths_of(tree.first(nodes // 2))
        line = chain(pairs, gamma)
        assert line.parents.tolist() == list(range(line.nodes))
        plain = all_paths(pairs, np.ones(gamma))
        for step, path in enumerate(paths_of(line)[1:]):
            among = {p: score for p, score in plain.items() if p[:-1] == path[:-1]}
            assert among[path] == max(among.values()) == pytest.approx(line.scores[step])


@pytest.mark.parametrize("width", [1, 16, 33])
def test_equal_rows_give_the_lattices_tree(width):
    rng = np.random.default_rng(width)
    shares = -np.sort(-rng.dirichlet(np.ones(width), size=6), axis=1)
    tokens = rng.integers(0, 99, (6, width))
    pairs = PairLattice(tokens, shares[0], np.repeat(shares[1:, None], width, axis=1))
    for nodes, factors in ((7, None), (200, None), (200, np.array([0.9, 1.3, 0.7]))):
        expected, tree = (best_first(c, nodes, factors) for c in (Lattice(tokens, shares), pairs))
        for field in ("tokens", "parents", "depths", "scores"):
            np.testing.assert_array_equal(getattr(tree, field), getattr(expected, field))


def test_unsound_candidates_are_left_out():
    edges = np.array([[[0.5, np.nan, 7.0], [-3.0, 0.2, 0.1], [0.1, 0.1, 0.1]]])
    damaged = PairLattice(np.array([[1, 2, 99], [3, -1, 4]]), np.array([0.5, np.inf, 0.9]), edges)
    cured = damaged.sound(50)
    assert cured.sound(50).edges is cured.edges
    tree = best_first(cured, 99)
    assert dict(zip(paths_of(tree)[1:], tree.scores, strict=True)) == {
        (2,): 1.0, (1,): 0.5, (1, 4): 0.5, (1, 3): 0.25, (2, 4): 0.1,
    }  # fmt: skip
    np.testing.assert_allclose(best_first(cured.as_tree(9), 9).scores, tree.scores)
    for gamma, width in ((0, 3), (2, 0)):
        tokens, edges = np.zeros((gamma, width), np.int64), np.zeros((gamma // 2, width, width))
        none = PairLattice(tokens, np.zeros(width), edges)
        assert best_first(none.sound(), 5).nodes == chain(none, 5).nodes == 0
