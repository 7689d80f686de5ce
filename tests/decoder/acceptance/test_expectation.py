"""What is expected of draws is what past rounds gave."""

import numpy as np
import pytest
import torch

from decoder.acceptance.drawn import DrawnTree, RankExpectation

CONFIDENCE, BELOW = 0.5, 0.9  # at the root, and one level below
Q = torch.tensor([[CONFIDENCE, 0.2, 0.2, 0.1], [BELOW, 0.1, 0.0, 0.0]])


def star(children):
    """A root with `children` drawn children, of which the first has one."""
    parents = np.array([0] * children + [1], dtype=np.int64)
    sources = np.full(children + 2, -1)
    sources[[0, 1]] = [0, 1]
    depths = np.array([1] * children + [2])
    return DrawnTree(np.arange(children + 1), parents, depths, np.ones(children + 1), Q, sources)


def expected(expectation, width=4, confidence=CONFIDENCE):
    return expectation.of(np.array([confidence]), width)[0]


@pytest.mark.parametrize("confidence", [0.0, 0.01, 0.3, 0.6, 0.97, 1.0, float("nan")])
def test_before_any_round(confidence):
    """A sub-distribution over the draws that never rises, and sure of a sure drafter."""
    found = expected(RankExpectation(), 20, confidence)
    assert found.shape == (20,)
    assert (found >= 0.0).all()
    assert found.sum() <= 1.0 + 1e-12
    assert (np.diff(found) <= 0.0).all()
    if confidence == 1.0:
        assert found[0] == pytest.approx(0.95)


def test_frequencies_are_learnt_from_trees_of_any_width():
    """Each draw's share given that its parent was reached, from a known acceptance."""
    shares = np.array([0.45, 0.25, 0.1])
    random = np.random.default_rng(5)
    expectation = RankExpectation()
    for _ in range(6000):
        children = int(random.integers(1, 4))
        accepted = int(np.searchsorted(shares.cumsum(), random.random()))
        rows = [accepted + 1] if accepted < children else []
        expectation.observe(star(children), rows)
    np.testing.assert_allclose(expected(expectation, 3), shares, atol=0.07)


def test_a_deeper_node_counts_at_its_own_level():
    expectation = RankExpectation()
    for _ in range(200):
        expectation.observe(star(1), [1])
    assert expected(expectation, 1)[0] > 0.9
    assert expected(expectation, 1, BELOW)[0] < 0.15
    np.testing.assert_allclose(expectation.usual_confidences(2), [CONFIDENCE, BELOW], atol=0.01)
    assert len(expectation.usual_confidences(100)) == 100


def test_lattice_of_draws():
    lattice = RankExpectation().lattice(np.array([0.9, 0.2]), 5)
    assert lattice.tokens.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert lattice.probabilities[0, 0] > lattice.probabilities[1, 0]
