"""The released and the printed rule of BASTION against loops written out."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from costmodel.profile.profile import Profile
from decoder.policies.bastion import Bastion
from decoder.policies.parse import parse_policy
from decoder.tree.draft_tree import best_first
from lab.papers.bastion.policy import PaperBastion, PrintedBastion, released_calibration
from tests.decoder.policies.test_policies import CONTEXT, FREE, Stairs, costs, lattice


@pytest.mark.parametrize(
    ("name", "kind", "fit"),
    [
        ("bastion:paper", PaperBastion, released_calibration),
        ("bastion:printed", PrintedBastion, Profile.linear_calibration),
    ],
)
def test_each_name_asks_for_its_own_calibration(name, kind, fit):
    asked = []
    policy = parse_policy(name, lambda fit=None: asked.append(fit) or Stairs(), 9)
    assert (type(policy), policy.name, policy.max_nodes, asked) == (kind, name, 9, [fit])


def released(candidates, cost, most_rows, floor=32):
    """Rows by the loop of BASTION's public code, whose trees count the root.

    Also whether a decision was within rounding, where either answer is right.
    """

    def seconds(rows):
        return float(cost.cycle_s(np.array([rows - 1.0]), CONTEXT)[0])

    size, returned, total, close = 0, floor, 0.0, False
    for score in (1.0, *best_first(candidates, most_rows - 1).scores):
        if size >= floor:
            gained = score * seconds(size)
            lost = total * (seconds(size + 1) - seconds(size))
            close |= abs(gained - lost) < 1e-12 * seconds(size)
            if gained <= lost:
                break
        size, total = size + 1, total + score
        if size >= returned + floor:
            returned += floor
    return min(size, returned), close


class TestTheReleasedRule:
    @given(costs, st.floats(0.01, 0.99), st.integers(1, 200))
    @settings(deadline=None)
    def test_trees_are_those_of_the_public_loop(self, cost, first, most):
        candidates = lattice(first, depth=8, width=12)
        rows, close = released(candidates, cost, most + 1)
        assume(not close)
        assert PaperBastion(cost, most).choose(candidates, CONTEXT, FREE).rows == rows

    def test_the_least_tree_has_32_rows_and_steps_have_32(self):
        """Each node costs half a plain step: nothing pays, and 31 nodes are taken still."""
        dear = Stairs(step_s=0.0, node_s=0.5)
        assert PaperBastion(dear, 200).choose(lattice(0.5), CONTEXT, FREE).nodes == 31
        free = Stairs(step_s=0.0, node_s=0.0)
        wide = lattice(0.5, depth=8, width=12)
        assert PaperBastion(free, 200).choose(wide, CONTEXT, FREE).rows == 192
        assert PaperBastion(free, 20).choose(wide, CONTEXT, FREE).nodes == 20


class TestThePrintedRule:
    """Algorithm 1: grow until the estimated speed drops for the first time."""

    @given(costs, st.floats(0.01, 0.99))
    @settings(deadline=None)
    def test_it_stops_at_the_first_drop(self, cost, first):
        candidates, most = lattice(first), 40
        speeds = []
        for nodes in range(most + 1):
            tree = best_first(candidates, nodes)
            if tree.nodes < nodes:
                break
            cycle_s = float(cost.cycle_s(np.array([nodes]), CONTEXT)[0])
            speeds.append(tree.expected_committed / cycle_s)
        expected = next(
            (n for n in range(len(speeds) - 1) if speeds[n + 1] < speeds[n]), len(speeds) - 1
        )
        assert PrintedBastion(cost, most).choose(candidates, CONTEXT, FREE).nodes == expected

    def test_it_misses_what_lies_behind_a_step(self):
        cost = Stairs(step_s=0.2, node_s=0.0, every=8)
        assert PrintedBastion(cost, 60).choose(lattice(0.5), CONTEXT, FREE).nodes < (
            Bastion(cost, 60).choose(lattice(0.5), CONTEXT, FREE).nodes
        )
