"""The rules for sampled trees: exact and of the right acceptance, by full enumeration."""

from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from decoder.acceptance.nodes import JudgedRows, VisitedRows, judge_rows
from decoder.acceptance.rules import Accepted, recursive_rejection, traversal, walk
from tests.conftest import reference
from tests.decoder.enumeration import Target, drawn_trees, enumerate_rule
from tests.decoder.models import shaped


def visiting(rule, tree, logits):
    """The rule over visited rows, each number of which is worked out once a tree."""
    weights = SimpleNamespace(distribution=torch.exp, one_of=lambda weights: weights)
    visited = VisitedRows(tree, logits, weights, whole_paths=rule is traversal)
    parts = {name: cache(getattr(visited, name)) for name in ("share", "kept", "token")}
    return partial(drawing, rule, tree, SimpleNamespace(**parts), lambda token: token)


def judging(rule, tree, logits):
    """The rule over the numbers of all rows, as on an accelerator."""
    left = []

    def draw(weights):  # the place of a row's weights, from which the script draws later
        left.extend(weights)
        return torch.arange(len(left) - len(weights), len(left)).double()

    numbers = judge_rows(
        tree, lambda rows: logits[rows].exp(), draw, device=logits.device,
        whole_paths=rule is traversal,
    )  # fmt: skip
    return partial(drawing, rule, tree, JudgedRows(tree, numbers.numpy()), left.__getitem__)


def drawing(rule, tree, rows, weights, choices):
    outcome = rule(tree, rows, choices)
    return replace(outcome, bonus=choices.one_of(weights(outcome.bonus)))


RULES = {
    "recursive_rejection": partial(visiting, recursive_rejection),
    "traversal": partial(visiting, traversal),
    "recursive_rejection of all rows": partial(judging, recursive_rejection),
    "traversal of all rows": partial(judging, traversal),
}
ORACLE_CASES = 7

# Parents' rows, node by node: unequal numbers of children, three levels, a chain, siblings
# whose subtrees are interleaved in row order.
SHAPES = {
    "chain": [0, 1, 2], "wide": [0, 0, 0], "unequal": [0, 0, 1, 1, 2], "deep-left": [0, 0, 1, 3, 3],
    "deep-right": [0, 0, 2, 2, 3], "interleaved": [0, 1, 0, 3, 1],
}  # fmt: skip


def random_rows(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return (1.5 * torch.randn(shape, generator=generator, dtype=torch.float64)).softmax(-1)


def random_target(vocab, seed):
    """A target with a distribution of its own after every path."""

    def after(path):
        key = seed + sum((token + 1) * 7 ** (place + 1) for place, token in enumerate(path))
        return random_rows(key, vocab)

    return Target(after, vocab)


def random_draft(depth, vocab, seed):
    return random_rows(1000 + seed, depth, vocab).float().double()


def oracle_case(index):
    case = reference("acceptance")[index]
    one = {(int(token),): row for token, row in case["target_after_one"].items()}
    two = {tuple(map(int, key.split(","))): row for key, row in case["target_after_two"].items()}
    tables = {(): case["target_root"], **one, **two}
    target = Target(lambda path: torch.tensor(tables[path], dtype=torch.float64), case["vocab"])
    first, second = case["children"]
    parents = [0] * first + [row for row in range(1, first + 1) for _ in range(second)]
    draft = torch.tensor(case["draft"], dtype=torch.float64)
    return case["expected_accepted"], target, draft, parents


# Later cases have so many trees that they take a second, and the last one five.
ENUMERATED = [
    *((index, name) for index in (0, 1) for name in RULES),
    *(pytest.param(index, name, marks=pytest.mark.slow)
      for index in range(2, ORACLE_CASES - 1) for name in ("recursive_rejection", "traversal")),
]  # fmt: skip


@pytest.mark.parametrize(("index", "name"), ENUMERATED)
def test_expected_acceptance_equals_the_reference(index, name):
    expected, target, draft, parents = oracle_case(index)
    trees = drawn_trees(parents, draft)
    accepted, emitted = enumerate_rule(RULES[name], trees, target, 3)
    assert accepted == pytest.approx(expected[name.partition(" ")[0]], abs=1e-9)
    np.testing.assert_allclose(emitted, target.joint(3), atol=1e-12)


@pytest.mark.parametrize("index", range(ORACLE_CASES))
def test_walk_on_the_most_probable_children_equals_the_reference(index):
    expected, target, draft, parents = oracle_case(index)
    tree = most_probable_tree(parents, draft)
    walking = partial(partial, walk)
    accepted, emitted = enumerate_rule(walking, [(1.0, tree)], target, 3)
    assert accepted == pytest.approx(expected["walk_top_k"], abs=1e-9)
    np.testing.assert_allclose(emitted, target.joint(3), atol=1e-12)


def most_probable_tree(parents, draft):
    ranks, depths = torch.argsort(draft, descending=True), shaped(parents).depths
    places = [parents[:node].count(parent) for node, parent in enumerate(parents)]
    return shaped(parents, [int(ranks[d - 1, k]) for d, k in zip(depths, places, strict=True)])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", RULES)
def test_exact_for_general_trees(name, shape):
    """The emitted text follows the target; traversal accepts as much as the textbook's."""
    vocab, seed = 3, 1
    target = random_target(vocab, seed)
    trees = list(drawn_trees(SHAPES[shape], random_draft(3, vocab, seed)))
    accepted, emitted = enumerate_rule(RULES[name], trees, target, 4)
    np.testing.assert_allclose(emitted, target.joint(4), atol=1e-12)
    if name.startswith("traversal"):
        textbook, _ = enumerate_rule(partial(partial, textbook_traversal), trees, target, 4)
        assert accepted == pytest.approx(textbook, abs=1e-9)


@pytest.mark.parametrize("name", RULES)
def test_a_smaller_vocabulary_of_the_drafter(name):
    """The target's last token is one that the drafter does not know."""
    target, draft = random_target(4, seed=7), random_draft(2, 3, seed=7)
    trees = list(drawn_trees([0, 0, 1, 1], draft))
    assert all(tree.q.shape[1] == 3 for _, tree in trees)
    _, emitted = enumerate_rule(RULES[name], trees, target, 3)
    np.testing.assert_allclose(emitted, target.joint(3), atol=1e-12)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", RULES)
def test_branches_may_compete_for_a_budget(name, seed):
    """Shapes that depend on other branches' tokens, as when a drafter goes level by level."""
    target = random_target(3, seed)
    trees = list(competing_trees(random_draft(9, 3, seed), nodes=4))
    assert len({tuple(tree.parents.tolist()) for _, tree in trees}) > 3
    assert sum(chance for chance, _ in trees) == pytest.approx(1.0)
    _, emitted = enumerate_rule(RULES[name], trees, target, 5)
    np.testing.assert_allclose(emitted, target.joint(5), atol=1e-12)


def competing_trees(draft, nodes):
    """(probability, tree) of every tree grown node by node, each time at the best score.

    q below a node depends on its token, and so does the score of its children: the
    probability of the parent's token. Tokens are drawn as the nodes are taken.
    """

    def grow(chance, tokens, parents, scores):
        if len(tokens) == nodes:
            yield chance, drawn(tokens, parents)
            return
        places = [(scores[row] * 0.5 ** parents.count(row), row) for row in range(len(scores))]
        _, row = max(place for place in places if parents.count(place[1]) < 3)
        q = draft[source(tokens, row)].tolist()
        taken = [token for token, parent in zip(tokens, parents, strict=True) if parent == row]
        free = [token for token in range(3) if token not in taken]
        for token in free:
            share = q[token] / sum(q[one] for one in free)
            yield from grow(
                chance * share, [*tokens, token], [*parents, row],
                [*scores, scores[row] * q[token] ** 0.5],
            )  # fmt: skip

    def source(tokens, row):
        return 0 if row == 0 else 1 + tokens[row - 1]

    def drawn(tokens, parents):
        sources = np.full(nodes + 1, -1)
        for row in parents:
            sources[row] = source(tokens, row)
        return shaped(parents, tokens, drawn=(draft, sources))

    yield from grow(1.0, [], [], [1.0])


def textbook_traversal(tree, logits, choices):
    """Leaf to root as stated in the paper, on arrays p, q and r that are changed in place."""
    p = {row: logits[row].exp() for row in range(tree.rows)}
    inner = [(row, tree.q[source]) for row, source in enumerate(tree.sources) if source >= 0]
    q = {row: below / below.sum() for row, below in inner}
    left = {row: list(np.flatnonzero(tree.parents == row) + 1) for row in range(tree.rows)}
    changed = {0: 1.0}  # r, where it is not min(1, r(parent) p / q) any more
    while True:
        path, ratio = [0], changed[0]
        while left[path[-1]]:
            parent, child = path[-1], left[path[-1]][0]
            token = int(tree.tokens[child - 1])
            ratio = min(1.0, ratio * float(p[parent][token] / q[parent][token]))
            ratio = changed.get(child, ratio)
            path.append(child)
        if len(path) == 1 or choices.happens(ratio):
            tokens = [int(tree.tokens[row - 1]) for row in path[1:]]
            return Accepted([int(row) for row in path[1:]], tokens, choices.one_of(p[path[-1]]))
        leaf, parent = path[-1], path[-2]
        above = 1.0
        for child, higher in zip(path[1:-1], path[:-2], strict=True):
            token = int(tree.tokens[child - 1])
            above = min(1.0, above * float(p[higher][token] / q[higher][token]))
            above = changed.get(child, above)
        excess = (above * p[parent] - q[parent]).clamp_min(0)
        total = float(excess.sum())
        if total > 0.0:
            p[parent] = excess / total
        if parent:
            changed[parent] = total / (total + (1.0 - above))
        q[parent][int(tree.tokens[leaf - 1])] = 0.0
        if q[parent].sum() > 0.0:
            q[parent] = q[parent] / q[parent].sum()
        left[parent].pop(0)
