"""DynaTree, beams and static trees against algorithms spelt out, path by path."""

from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.errors import InputError
from decoder.policies.base import Limits
from decoder.policies.bastion import parse_policy
from decoder.tree.draft_tree import EMPTY, DraftTree, Lattice
from decoder.tree.growth import SINGLE_PATH, TopPaths, grow
from lab.papers.dynatree.baselines import Beam, FixedTree, source_of
from lab.papers.dynatree.policy import ConfidentGrowth, DynaTree, HistorySettings
from tests.decoder.models import as_paths, paths_of, random_candidates, round_of

FREE = Limits(nodes=10_000, depth=64)


def algorithm_1(children, rule):
    """The paper's loop from a queue, rooted at the bonus token, pruned children left out."""
    queue, nodes = deque([((), 1.0)]), []
    while queue and len(nodes) < rule.max_nodes:
        path, score = queue.popleft()
        depth = len(path)
        deep = depth >= rule.base_depth and score <= rule.deep_score
        below = children(path)
        if depth >= rule.max_depth or score < rule.stop_score or deep or not below:
            continue
        confidence = max(probability for _, probability in below)
        breadth = rule.many if confidence < rule.unsure else rule.some
        breadth = rule.few if confidence >= rule.sure else breadth
        for token, probability in sorted(below, key=lambda child: -child[1])[:breadth]:
            if score * probability >= rule.least_score and len(nodes) < rule.max_nodes:
                nodes.append((*path, token))
                queue.append(((*path, token), score * probability))
    return nodes


def children_of(candidates):
    """path -> [(token, probability)], the most probable first: the source, spelt out."""
    if isinstance(candidates, Lattice):
        both = candidates.tokens.tolist(), candidates.probabilities.tolist()
        rows = [list(zip(*row, strict=True)) for row in zip(*both, strict=True)]
        return lambda path: rows[len(path)] if len(path) < len(rows) else []
    table = {path: [] for path in [(), *as_paths(candidates)]}
    for path, probability in as_paths(candidates).items():
        table[path[:-1]].append((path[-1], probability))
    return lambda path: sorted(table[path], key=lambda child: -child[1])


rules = st.builds(
    ConfidentGrowth, base_depth=st.integers(1, 4), max_depth=st.integers(1, 6), few=st.just(1),
    some=st.integers(1, 2), many=st.integers(2, 4), sure=st.sampled_from([0.0, 0.3, 0.7, 0.9, 1.0]),
    unsure=st.sampled_from([0.2, 0.4]), stop_score=st.sampled_from([0.0, 0.05, 0.2]),
    deep_score=st.sampled_from([0.1, 0.3]), least_score=st.sampled_from([0.0, 0.03, 0.1]),
    max_nodes=st.sampled_from([1, 7, 40, 256]),
)  # fmt: skip


@pytest.mark.slow
@given(st.integers(0, 10_000), rules)
@settings(max_examples=150)
def test_the_tree_is_that_of_algorithm_1(seed, rule):
    candidates = random_candidates(np.random.default_rng(seed), 300)
    found = grow(source_of(candidates), rule, 64)
    assert list(as_paths(found)) == algorithm_1(children_of(candidates), rule)
    again = grow(source_of(found), rule, 64)
    np.testing.assert_array_equal(again.tokens, found.tokens)
    np.testing.assert_array_equal(again.parents, found.parents)


def test_the_policy_verifies_the_grown_tree_with_its_path_scores():
    candidates = random_candidates(np.random.default_rng(1), 300)
    policy, children = DynaTree(max_nodes=256), children_of(candidates)
    tree = policy.choose(candidates, 10, FREE)
    expected = algorithm_1(children, policy.growth)
    paths = paths_of(tree)[1:]
    assert sorted(paths) == sorted(expected)
    for path, given_score in zip(paths, tree.scores, strict=True):
        assert given_score == pytest.approx(score(path, children), rel=1e-12)
    assert policy.choose(candidates, 10, Limits(nodes=3, depth=64)).nodes == 3
    flat = policy.choose(candidates, 10, Limits(nodes=300, depth=1)).depths.tolist()
    assert flat == [1 for path in expected if len(path) == 1]
    assert DynaTree(max_nodes=64).growth.max_nodes == 64
    assert DynaTree(max_nodes=1000).max_nodes == 256


def chain_of(depth):
    rows = np.arange(depth, dtype=np.int64)
    return DraftTree(rows, rows, rows + 1, np.full(depth, 0.5))


def write(policy, text, *rounds):
    """One text, its rounds given as (drafted levels, accepted ones)."""
    for depth, accepted in rounds:
        finished = round_of(chain_of(depth), list(range(1, accepted + 1)), 100)
        policy.observe(replace(finished, text=text))
    policy.ended(text)


def test_nothing_is_adapted_within_a_text_or_before_the_fifth():
    policy = DynaTree(256)
    for text in range(4):
        write(policy, text, *[(5, 5)] * 50)
    policy.ended(99)  # a text without any tree
    assert policy.growth == ConfidentGrowth()
    for _ in range(50):
        policy.observe(round_of(chain_of(5), [1, 2, 3, 4, 5], 100))
        policy.observe(round_of(EMPTY, [], 100))
    assert policy.growth == ConfidentGrowth()
    policy.ended(0)
    assert policy.growth.base_depth == 6


def moved(policy):
    growth = policy.growth
    return growth.base_depth, pytest.approx(growth.sure), pytest.approx(growth.deep_score)


def test_the_updates_by_hand():
    """Shares are tokens a round, the target's own included, over 5 + 2: 7 / 7 = 1 first."""
    policy = DynaTree(256, HistorySettings(window=2, least_texts=1))
    write(policy, 0, (6, 6))
    assert moved(policy) == (6, 0.85, 0.45)
    write(policy, 1, (6, 4))  # 0.714; mean 0.857
    assert moved(policy) == (7, 0.8, 0.4)
    write(policy, 2, (6, 4))  # mean 0.714, within the dead zone
    write(policy, 3, (6, 3), (6, 3))  # 0.571; mean 0.643, as well
    assert moved(policy) == (7, 0.8, 0.4)
    write(policy, 4, (6, 0), (6, 2))  # 0.286; mean 0.429 lies below the dead zone
    assert moved(policy) == (6, 0.85, 0.45)


@pytest.mark.parametrize(("tokens", "end"), [
    (29, (2, 0.95, 0.8)), (35, (2, 0.95, 0.8)), (41, (2, 0.95, 0.8)), (45, (5, 0.9, 0.5)),
    (55, (5, 0.9, 0.5)), (60, (7, 0.5, 0.3)),
])  # fmt: skip
def test_twenty_texts_of_constant_acceptance_end_where_the_authors_end(tokens, end):
    """Tokens of ten rounds; the ends are those of a replay of the authors' code."""
    policy = DynaTree(256)
    for text in range(20):
        short, longer = tokens // 10 - 1, tokens % 10
        write(policy, text, *[(8, short)] * (10 - longer), *[(8, short + 1)] * longer)
    assert end == moved(policy)


def test_a_name_sets_growth_and_history():
    policy = parse_policy("dynatree:window=3,deep_score=0.4,base_depth=4", None, 100)
    assert policy.name == "dynatree:window=3,deep_score=0.4,base_depth=4"
    assert (policy.growth.deep_score, policy.growth.base_depth) == (0.4, 4)
    assert policy._history == HistorySettings(window=3)
    assert policy.growth.max_nodes == 100


DEEP = 64


def random_lattice(rng, depth, width):
    """Distinct tokens in each position; no two paths have the same score."""
    tokens = np.stack([rng.permutation(50)[:width] for _ in range(depth)]).astype(np.int64)
    weights = -np.sort(-rng.dirichlet(np.ones(width + 1), depth), axis=1)
    return Lattice(tokens, weights[:, :width])


def score(path, children):
    product = 1.0
    for depth in range(len(path)):
        product *= dict(children(path[:depth]))[path[depth]]
    return product


def by_hand(children, width, frontier, depth, *, all_kept):
    """The best children of the best paths, level by level."""
    level, kept = [()], set()
    for _ in range(depth):
        below = [(*path, token) for path in level for token, _ in children(path)[:width]]
        level = sorted(below, key=lambda path: -score(path, children))[:frontier]
        kept |= set(below if all_kept else level)
    return kept


def fixed_tree_by_hand(children, rule):
    """Breadth first from a queue, one node at a time, until there is no room."""
    queue, kept = [()], []
    while queue:
        path = queue.pop(0)
        if len(path) > rule.levels or score(path, children) < rule.least_score:
            continue
        for token, _ in children(path)[: rule.width if path else 1]:
            if len(kept) < rule.max_nodes:
                kept.append((*path, token))
                queue.append((*path, token))
    return kept


def random_source(seed, lattice, size, depth, width):
    random = np.random.default_rng(seed)
    return random_lattice(random, depth, width) if lattice else random_candidates(random, size)


NUMBERS = (st.integers(0, most) for most in (10_000, 1, 25))
sources = st.builds(random_source, *NUMBERS, st.integers(1, 4), st.integers(1, 4))
few = st.integers(1, 5)


@given(sources, few, few, few)
@settings(max_examples=200)
def test_beams_and_top_paths(candidates, width, frontier, depth):
    children = children_of(candidates)
    rules = (Beam(width=width, max_depth=depth), width, width), (
        TopPaths(width=width, frontier=frontier, max_depth=depth), width, frontier
    ), (replace(SINGLE_PATH, max_depth=depth), 1, 1)  # fmt: skip
    for rule, *sizes in rules:
        found = as_paths(grow(source_of(candidates), rule, DEEP))
        wanted = by_hand(children, *sizes, depth, all_kept=not isinstance(rule, Beam))
        assert set(found) == wanted
        assert not isinstance(rule, Beam) or len(found) <= rule.max_nodes
        for path, probability in found.items():
            assert probability == dict(children(path[:-1]))[path[-1]]


@given(sources, few, few, st.integers(1, 40), st.sampled_from([0.0, 0.05, 0.3]))
@settings(max_examples=200)
def test_the_fixed_tree_in_breadth_first_order(candidates, width, levels, most, least_score):
    rule = FixedTree(width=width, levels=levels, max_nodes=most, least_score=least_score)
    found = as_paths(grow(source_of(candidates), rule, DEEP))
    assert list(found) == fixed_tree_by_hand(children_of(candidates), rule)


@pytest.mark.parametrize(("text", "nodes"), [
    ("beam:4x15", 60), ("beam:1x8", 8), ("static-tree:5x2", 1 + 2 + 4 + 8 + 16 + 32),
    ("static-tree:8x3", 256), ("static-tree:8x3:0.1", 256), ("dynatree", 256),
])  # fmt: skip
def test_names_and_largest_trees(text, nodes):
    policy = parse_policy(text, None, 256)  # without a cost
    assert policy.max_nodes == nodes
    assert policy.name == text.replace(":.", ":0.")


@pytest.mark.parametrize(("text", "problem"), [
    *((name, "is not a policy") for name in (
        "beam:4x", "beam:0x3", "beam:1000x2", "beam:2x3:0.1", "static-tree:2", "static-tree:2x3:",
        "static-tree:2x3:1.5", "dynatree:3", "beam:٤x٢")),
    ("dynatree:windows=3", "'windows=3' sets nothing"),
    ("dynatree:window=1.5", "'window=1.5' sets nothing"),
    ("dynatree:window=0", "window must be 1 or more"),
    ("dynatree:sure=nan", r"sure must lie in \[0, 1\]"),
])  # fmt: skip
def test_names_that_are_none(text, problem):
    with pytest.raises(InputError, match=problem):
        parse_policy(text, None, 256)
