"""The rules for sampled trees: exact and of the right acceptance, by full enumeration."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from decoder.acceptance.drawn import DrawnTree
from decoder.acceptance.nodes import JudgedRows, judge_rows
from decoder.acceptance.rules import Accepted, recursive_rejection, traversal, walk
from decoder.tree.draft_tree import DraftTree
from tests.conftest import reference
from tests.decoder.enumeration import Target, drawn_trees, enumerate_rule, visiting


def judged(rule):
    """The rule over the numbers of all rows, as on an accelerator."""

    def of_all_rows(tree, logits, choices):
        left = []

        def draw(weights):  # the place of a row's weights, from which the script draws later
            left.extend(weights)
            return torch.arange(len(left) - len(weights), len(left)).double()

        numbers = judge_rows(
            tree, lambda rows: logits[rows].exp(), draw, device=logits.device,
            whole_paths=rule is traversal,
        )  # fmt: skip
        outcome = rule(tree, JudgedRows(tree, numbers.numpy()), choices)
        return replace(outcome, bonus=choices.one_of(left[outcome.bonus]))

    return of_all_rows


RULES = {
    "recursive_rejection": visiting(recursive_rejection), "traversal": visiting(traversal),
    "recursive_rejection of all rows": judged(recursive_rejection),
    "traversal of all rows": judged(traversal),
}  # fmt: skip
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


# The later cases have so many outcomes that enumerating them takes ten seconds, and ten times as
# long over the numbers of all rows, whose rules are enumerated on general trees below.
ENUMERATED = [
    pytest.param(index, name, marks=pytest.mark.slow if index >= 2 else ())
    for index in range(ORACLE_CASES)
    for name in RULES
    if index < 2 or not name.endswith("all rows")
]


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
    accepted, emitted = enumerate_rule(walk, [(1.0, tree)], target, 3)
    assert accepted == pytest.approx(expected["walk_top_k"], abs=1e-9)
    np.testing.assert_allclose(emitted, target.joint(3), atol=1e-12)


def most_probable_tree(parents, draft):
    tokens, depths = [], [0]
    for node, parent in enumerate(parents):
        depths.append(depths[parent] + 1)
        ranks = torch.argsort(draft[depths[parent]], descending=True)
        tokens.append(int(ranks[parents[:node].count(parent)]))
    columns = [np.array(column, dtype=np.int64) for column in (tokens, parents, depths[1:])]
    return DraftTree(*columns, np.ones(len(parents)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", RULES)
def test_exact_for_general_trees(name, shape):
    """The emitted text follows the target, and as much is accepted as by the textbook rule."""
    vocab, seed = 3, 1
    target = random_target(vocab, seed)
    trees = list(drawn_trees(SHAPES[shape], random_draft(3, vocab, seed)))
    accepted, emitted = enumerate_rule(RULES[name], trees, target, 4)
    np.testing.assert_allclose(emitted, target.joint(4), atol=1e-12)
    textbook, _ = enumerate_rule(TEXTBOOK[name.partition(" ")[0]], trees, target, 4)
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
        sources, depths = np.full(nodes + 1, -1), [0]
        for row in parents:
            sources[row] = source(tokens, row)
            depths.append(depths[row] + 1)
        columns = [np.array(column, dtype=np.int64) for column in (tokens, parents, depths[1:])]
        return DrawnTree(*columns, np.ones(nodes), draft, sources)

    yield from grow(1.0, [], [], [1.0])


def textbook_rejection(tree, logits, choices):
    """facts: min(1, p / q); on rejection p <- norm([p - q]+), q without x, renormalised."""
    row, rows = 0, []
    while True:
        p = choices.distribution(logits[row])
        accepted = None
        if tree.sources[row] >= 0:
            q = tree.q[tree.sources[row]].clone()
            q /= q.sum()
            for child in np.flatnonzero(tree.parents == row) + 1:
                token = int(tree.tokens[child - 1])
                if choices.happens(min(1.0, float(p[token] / q[token]))):
                    accepted = int(child)
                    break
                p = (p - q).clamp_min(0)
                p = p / p.sum()
                q[token] = 0.0
                q = q / q.sum()
        if accepted is None:
            return textbook_outcome(tree, rows, choices.one_of(p))
        rows.append(accepted)
        row = accepted


def textbook_traversal(tree, logits, choices):
    """Leaf to root as stated in the paper, on arrays p, q and r that are changed in place."""
    p = {row: logits[row].exp() for row in range(tree.rows)}
    q = {
        row: tree.q[source] / tree.q[source].sum()
        for row, source in enumerate(tree.sources)
        if source >= 0
    }
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
            return textbook_outcome(tree, path[1:], choices.one_of(p[path[-1]]))
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


def textbook_outcome(tree, rows, bonus):
    return Accepted([int(row) for row in rows], [int(tree.tokens[row - 1]) for row in rows], bonus)


TEXTBOOK = {"recursive_rejection": textbook_rejection, "traversal": textbook_traversal}
