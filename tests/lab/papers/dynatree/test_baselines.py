"""Names of beam and static-tree policies."""

import pytest

from costmodel.errors import InputError
from decoder.policies.bastion import parse_policy


def no_cost(fit=None):
    raise AssertionError("no cost is needed")


def parsed(text, max_nodes=256):
    return parse_policy(text, no_cost, max_nodes)


@pytest.mark.parametrize(("text", "nodes"), [
    ("beam:4x15", 60), ("beam:1x8", 8), ("static-tree:5x2", 1 + 2 + 4 + 8 + 16 + 32),
    ("static-tree:8x3", 256), ("static-tree:8x3:0.1", 256), ("dynatree", 256),
])  # fmt: skip
def test_names_and_largest_trees(text, nodes):
    policy = parsed(text)
    assert policy.max_nodes == nodes
    assert policy.name == text.replace(":.", ":0.")


@pytest.mark.parametrize("text", [
    "beam:4x", "beam:0x3", "beam:1000x2", "beam:2x3:0.1", "static-tree:2", "static-tree:2x3:",
    "static-tree:2x3:1.5", "dynatree:3", "beam:٤x٢",
])  # fmt: skip
def test_names_that_are_none(text):
    with pytest.raises(InputError, match="is not a policy") as caught:
        parsed(text)
    assert caught.value.hint
