"""Growth rules against straight-line references that walk paths one by one."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.tree.draft_tree import Lattice
from decoder.tree.growth import SINGLE_PATH, TopPaths, grow
from lab.papers.dynatree.baselines import Beam, FixedTree, source_of
from tests.decoder.models import as_paths, random_candidates

DEEP = 64


def random_lattice(rng, depth, width):
    """Distinct tokens in each position; no two paths have the same score."""
    tokens = np.stack([rng.permutation(50)[:width] for _ in range(depth)]).astype(np.int64)
    weights = -np.sort(-rng.dirichlet(np.ones(width + 1), depth), axis=1)
    return Lattice(tokens, weights[:, :width])


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


def score(path, children):
    product = 1.0
    for depth in range(len(path)):
        product *= dict(children(path[:depth]))[path[depth]]
    return product


def beam_by_hand(children, width, depth):
    level, kept = [()], []
    for _ in range(depth):
        below = [(*path, token) for path in level for token, _ in children(path)[:width]]
        level = sorted(below, key=lambda path: -score(path, children))[:width]
        kept += level
    return set(kept)


def top_paths_by_hand(children, rule, depth):
    frontier, kept = [()], set()
    for _ in range(depth):
        below = [(*path, token) for path in frontier for token, _ in children(path)[: rule.width]]
        kept |= set(below)
        frontier = sorted(below, key=lambda path: -score(path, children))[: rule.frontier]
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


@given(sources, few, few)
@settings(max_examples=200)
def test_beam(candidates, width, depth):
    rule = Beam(width=width, max_depth=depth)
    children = children_of(candidates)
    found = as_paths(grow(source_of(candidates), rule, DEEP))
    assert set(found) == beam_by_hand(children, width, depth)
    assert len(found) <= rule.max_nodes
    for path, probability in found.items():
        assert probability == dict(children(path[:-1]))[path[-1]]


@given(sources, few, few, few)
@settings(max_examples=200)
def test_top_paths(candidates, width, frontier, depth):
    rule = TopPaths(width=width, frontier=frontier, max_depth=depth)
    found = as_paths(grow(source_of(candidates), rule, DEEP))
    assert set(found) == top_paths_by_hand(children_of(candidates), rule, depth)


@given(sources, few, few, st.integers(1, 40), st.sampled_from([0.0, 0.05, 0.3]))
@settings(max_examples=200)
def test_the_fixed_tree_in_breadth_first_order(candidates, width, levels, most, least_score):
    rule = FixedTree(width=width, levels=levels, max_nodes=most, least_score=least_score)
    found = as_paths(grow(source_of(candidates), rule, DEEP))
    assert list(found) == fixed_tree_by_hand(children_of(candidates), rule)


@given(sources, few)
@settings(max_examples=100)
def test_single_path_takes_the_best_child_at_every_step(candidates, depth):
    children, path = children_of(candidates), ()
    while len(path) < depth and children(path):
        path = (*path, children(path)[0][0])
    found = as_paths(grow(source_of(candidates), replace(SINGLE_PATH, max_depth=depth), DEEP))
    assert list(found) == [path[: i + 1] for i in range(len(path))]
