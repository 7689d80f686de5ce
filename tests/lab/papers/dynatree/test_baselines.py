"""Beam and static-tree policies and their names."""

import numpy as np
import pytest

from costmodel.errors import InputError
from decoder.policies.base import Limits
from decoder.policies.parse import parse_policy
from decoder.tree.draft_tree import Lattice

FREE = Limits(nodes=10_000, depth=64)


def no_cost(fit=None):
    raise AssertionError("no cost is needed")


def parsed(text, max_nodes=256):
    return parse_policy(text, no_cost, max_nodes)


def paths(tree):
    found = {0: ()}
    for node in range(tree.nodes):
        found[node + 1] = (*found[int(tree.parents[node])], int(tree.tokens[node]))
    return {found[row]: float(tree.scores[row - 1]) for row in range(1, len(found))}


LATTICE = Lattice(
    np.array([[1, 2], [3, 4], [5, 6]]), np.array([[0.6, 0.3], [0.9, 0.1], [0.5, 0.4]])
)


def test_a_beam_by_hand():
    """Level 2: 0.54, 0.27 before 0.06; level 3: 0.27, 0.216 before 0.135."""
    assert paths(parsed("beam:2x3").choose(LATTICE, 5, FREE)) == pytest.approx(
        {(1,): 0.6, (2,): 0.3, (1, 3): 0.54, (2, 3): 0.27, (1, 3, 5): 0.27, (1, 3, 6): 0.216}
    )


def test_a_static_tree_by_hand():
    """One drafted token and its levels; below tau = 0.1 nodes are kept but not expanded."""
    found = paths(parsed("static-tree:2x2").choose(LATTICE, 5, FREE))
    below = {(1, 3, 5): 0.27, (1, 3, 6): 0.216, (1, 4, 5): 0.03, (1, 4, 6): 0.024}
    assert found == pytest.approx({(1,): 0.6, (1, 3): 0.54, (1, 4): 0.06} | below)
    pruned = paths(parsed("static-tree:2x2:0.1").choose(LATTICE, 5, FREE))
    assert set(pruned) == {(1,), (1, 3), (1, 4), (1, 3, 5), (1, 3, 6)}


def test_room_and_depth_bound_the_tree():
    for text, level in (("beam:2x3", [1, 2]), ("static-tree:3x2", [1])):
        policy = parsed(text)
        assert policy.choose(LATTICE, 5, Limits(nodes=1, depth=3)).tokens.tolist() == [1]
        assert policy.choose(LATTICE, 5, Limits(nodes=99, depth=1)).tokens.tolist() == level


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("beam:4x15", 60),
        ("beam:1x8", 8),
        ("static-tree:5x2", 1 + 2 + 4 + 8 + 16 + 32),
        ("static-tree:8x3", 256),
        ("static-tree:8x3:0.1", 256),
        ("dynatree", 256),
    ],
)
def test_names_and_largest_trees(text, nodes):
    policy = parsed(text)
    assert policy.max_nodes == nodes
    assert policy.name == text.replace(":.", ":0.")


@pytest.mark.parametrize(
    "text",
    [
        "beam:4x",
        "beam:0x3",
        "beam:1000x2",
        "beam:2x3:0.1",
        "static-tree:2",
        "static-tree:2x3:",
        "static-tree:2x3:1.5",
        "dynatree:3",
        "beam:٤x٢",
    ],
)
def test_names_that_are_none(text):
    with pytest.raises(InputError, match="is not a policy") as caught:
        parsed(text)
    assert caught.value.hint
