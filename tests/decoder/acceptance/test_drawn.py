"""Draws without replacement against exact probabilities, and what is expected of them."""

from collections import Counter

import numpy as np
import pytest
import torch

from decoder.acceptance import drawn as drawing
from decoder.acceptance.drawn import RankExpectation, draw_from_lattice, without_replacement
from decoder.acceptance.sampling import Sampling, target_distribution
from decoder.tree.draft_tree import DraftTree, Lattice, best_first
from tests.decoder.enumeration import chi_square_p, ordered_draws
from tests.decoder.models import shaped

DRAWS = 20_000
DISTRIBUTIONS = torch.tensor([  # with the second most independent draws repeat a token
    [0.4, 0.3, 0.2, 0.1, 0.0], [0.96, 0.01, 0.01, 0.01, 0.01], [1e-4, 0.0, 0.5, 0.4999, 0.0],
])  # fmt: skip


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def p_value(drawn, exact):
    """Drawn token tuples against {tuple: probability}."""
    counts = Counter(map(tuple, drawn.tolist()))
    assert set(counts) <= set(exact)
    observed = [counts[tokens] for tokens in exact]
    return chi_square_p(observed, len(drawn) * np.array(list(exact.values())))


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("source", range(3))
def test_ordered_draws_have_their_exact_probabilities(source, count):
    """All parents at once, with those of other distributions and counts beside them."""
    sources = np.tile([source, 2 - source], DRAWS)
    counts = np.tile([count, 2], DRAWS)
    drawn = without_replacement(DISTRIBUTIONS, sources, counts, generator(count))
    assert drawn.shape == (2 * DRAWS, max(count, 2))
    mine = drawn[::2, :count]
    draws = ordered_draws(DISTRIBUTIONS[source].tolist(), count)
    assert p_value(mine, {tokens: probability for probability, tokens in draws}) > 0.001


def test_parents_of_one_distribution_draw_independently():
    q = DISTRIBUTIONS[:1]
    drawn = without_replacement(
        q, np.zeros(2 * DRAWS, np.int64), np.ones(2 * DRAWS, np.int64), generator(9)
    )
    pairs = drawn[:, 0].reshape(DRAWS, 2)
    exact = {(a, b): float(q[0, a] * q[0, b]) for a in range(4) for b in range(4)}
    assert p_value(pairs, exact) > 0.001


def test_children_that_q_has_no_token_for_are_left_out():
    """Three children wanted of two possible: the third and its subtree go, rows close up."""
    q = torch.tensor([[0.0, 0.5, 0.5], [0.2, 0.3, 0.5]])
    tree = draw_from_lattice(shaped([0, 0, 0, 3, 1], scores=np.arange(5.0)), q, generator())
    assert sorted(tree.tokens[:2].tolist()) == [1, 2]
    assert tree.parents.tolist() == [0, 0, 1]
    assert tree.depths.tolist() == [1, 1, 2]
    assert tree.scores.tolist() == [0.0, 1.0, 4.0]
    assert tree.sources.tolist() == [0, 1, -1, -1]
    assert tree.child_rows()[0] == [1, 2]


@pytest.mark.parametrize("vocab", [3, 40])
def test_rounding_never_yields_a_token_of_no_probability(vocab):
    """Everything is drawn that can be, until rounding alone is left; the last token cannot."""
    random = generator(12)
    for _ in range(300):
        q = torch.rand(2, vocab, generator=random) ** 2 + 1e-4
        q[:, vocab // 2 :] = 0.0
        q = q / q.sum(-1, keepdim=True)
        drawn = without_replacement(q, np.array([0, 1, 1]), np.full(3, vocab), random)
        possible = (q > 0).sum(-1)[[0, 1, 1]].numpy()
        assert ((drawn >= 0).sum(1) == possible).all()
        assert (drawn < vocab // 2).all()


def test_a_drawn_tree_has_the_shape_of_its_topology():
    """Distinct siblings, q per depth, scores kept; the topology's tokens play no part."""
    whole = torch.randn(4, 50, generator=generator(3)).softmax(-1)
    ranks = np.tile([0.5, 0.2, 0.1, 0.05], (4, 1))
    shape = best_first(Lattice(np.tile(np.arange(4), (4, 1)), ranks), 40)
    tree = draw_from_lattice(shape, whole, generator(4))
    np.testing.assert_array_equal(tree.parents, shape.parents)
    np.testing.assert_array_equal(tree.scores, shape.scores)
    torch.testing.assert_close(tree.q, whole[: shape.depths.max()], rtol=0, atol=0)
    depths = [0, *shape.depths.tolist()]
    for row in range(tree.rows):
        children = np.array(tree.child_rows()[row], dtype=np.int64)
        tokens = tree.tokens[children - 1].tolist()
        assert len(set(tokens)) == len(tokens)
        assert tree.sources[row] == (depths[row] if len(children) else -1)
    again = DraftTree(shape.tokens[::-1].copy(), shape.parents, shape.depths, shape.scores)
    same = draw_from_lattice(again, whole, generator(4))
    np.testing.assert_array_equal(same.tokens, tree.tokens)


@pytest.mark.parametrize("sampling", [{"top_k": 3}, {"top_p": 0.7}, {"top_k": 4, "top_p": 0.5}])
def test_q_is_cut_where_the_target_would_be(sampling):
    """The least kept probability, against the target's own top-k and top-p on the same row."""
    wanted = Sampling(temperature=1.0, **sampling)
    logits = torch.randn(6, 20, generator=generator(8)) * 2
    whole = logits.softmax(-1)
    cut = drawing.least_kept(whole.topk(10).values.double().numpy(), wanted)
    only_k = Sampling(temperature=1.0, top_k=wanted.top_k)
    for row, least in enumerate(cut):
        kept = whole[row].double().numpy() >= least
        # top-p counts the mass after top-k there, and the whole mass here: never fewer tokens.
        allowed = target_distribution(logits[row], wanted) > 0
        assert (kept | ~allowed.numpy()).all()
        if wanted.top_p == 1.0 or wanted.top_k == 0:
            assert (kept == allowed.numpy()).all()
        assert kept.sum() <= (target_distribution(logits[row], only_k) > 0).sum()


CONFIDENCE, BELOW = 0.5, 0.9  # at the root, and one level below
Q = torch.tensor([[CONFIDENCE, 0.2, 0.2, 0.1], [BELOW, 0.1, 0.0, 0.0]])


def star(children):
    """A root with `children` drawn children, of which the first has one."""
    sources = np.array([0, 1, *[-1] * children])
    return shaped([0] * children + [1], np.arange(children + 1), drawn=(Q, sources))


def expected(expectation, width=4, confidence=CONFIDENCE):
    return expectation.lattice(np.array([confidence]), width).probabilities[0]


@pytest.mark.parametrize("confidence", [0.0, 0.01, 0.3, 0.6, 0.97, 1.0, float("nan")])
def test_before_any_round(confidence):
    """A sub-distribution over the draws that never rises, and sure of a sure drafter."""
    found = expected(RankExpectation(), 20, confidence)
    assert RankExpectation().lattice(np.ones(2), 5).tokens.tolist() == [[0, 1, 2, 3, 4]] * 2
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
        expectation.observe(star(children), rows, (CONFIDENCE, BELOW).__getitem__)
    np.testing.assert_allclose(expected(expectation, 3), shares, atol=0.07)


def test_a_deeper_node_counts_at_its_own_level():
    expectation = RankExpectation()
    for _ in range(200):
        expectation.observe(star(1), [1], (CONFIDENCE, BELOW).__getitem__)
    assert expected(expectation, 1)[0] > 0.9
    assert expected(expectation, 1, BELOW)[0] < 0.15
    np.testing.assert_allclose(expectation.usual_confidences(2), [CONFIDENCE, BELOW], atol=0.01)
    assert len(expectation.usual_confidences(100)) == 100
