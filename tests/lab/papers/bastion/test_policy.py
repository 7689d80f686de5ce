"""The released and the printed rule of BASTION against loops written out, and its calibration."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from costmodel.acceptance import process_of, published_rows
from costmodel.io import shipped_directory
from costmodel.profile.profile import Profile
from decoder.model.runtime.capture import BUCKETS
from decoder.policies.bastion import parse_policy
from decoder.tree.draft_tree import Lattice, best_first
from lab.papers.bastion import policy as paper
from lab.papers.bastion.policy import PaperBastion, PrintedBastion, fit_released
from lab.studies.controller_simulated import DRAFT_SHARE, TARGET, CostAt, Place, draw_rounds
from tests.costmodel.calibration.test_physical import truth
from tests.costmodel.conftest import A6000, grid
from tests.decoder.policies.test_policies import CONTEXT, FREE, Stairs, costs, lattice


@pytest.mark.parametrize(("name", "kind", "fit"), [
    ("bastion:paper", PaperBastion, paper.released_calibration),
    ("bastion:printed", PrintedBastion, Profile.linear_calibration),
])  # fmt: skip
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


@given(costs, st.floats(0.01, 0.99), st.integers(1, 200))
def test_trees_are_those_of_the_public_loop(cost, first, most):
    candidates = lattice(first, depth=8, width=12)
    rows, close = released(candidates, cost, most + 1)
    assume(not close)
    assert PaperBastion(cost, most).choose(candidates, CONTEXT, FREE).rows == rows


class TestThePrintedRule:
    """Algorithm 1: grow while the estimated speed rises."""

    @given(costs, st.floats(0.01, 0.99), st.integers(0, 40))
    def test_trees_are_those_of_the_printed_loop(self, cost, first, most):
        candidates = lattice(first)
        nodes, best = 0, -np.inf
        for count in range(1, most + 1):
            tree = best_first(candidates, count)
            cycle_s = float(cost.cycle_s(np.array([count]), CONTEXT)[0])
            if tree.nodes < count or tree.expected_committed / cycle_s <= best:
                break
            nodes, best = count, tree.expected_committed / cycle_s
        assert PrintedBastion(cost, most).choose(candidates, CONTEXT, FREE).nodes == nodes

    def test_the_first_node_is_taken_and_equal_speed_stops(self):
        """Costs of 1, 2, 4 for 0, 1, 2 nodes: A of 1, 1.5, 1.75, so the first node slows down."""
        halves = Lattice(np.arange(3)[:, None], np.full((3, 1), 0.5))
        dear = CostAt(np.array([1.0, 2.0, 4.0, 8.0]), 0.0, 1.0)
        assert PrintedBastion(dear, 3).choose(halves, CONTEXT, FREE).nodes == 1
        # A of 1, 1.5, 1.75, 1.875 at these costs: speeds of 1, 0.75, 0.75, 0.9375.
        level = CostAt(np.array([1.0, 2.0, 1.75 / 0.75, 2.0]), 0.0, 1.0)
        assert PrintedBastion(level, 3).choose(halves, CONTEXT, FREE).nodes == 1


@pytest.mark.parametrize(("device", "rows", "padded_rows"), [
    ("a100-sxm-80gb", (57, 64), (32, 34)), ("b200", (75, 85), (36, 40)),
])  # fmt: skip
def test_the_released_rule_is_priced_without_padding(device, rows, padded_rows):
    """Mean rows on BASTION's eight curves of Qwen3-8B; priced by the bucket it would stop early."""
    profile = Profile.from_yaml(shipped_directory() / device / TARGET)
    place = Place.of(device, profile, DRAFT_SHARE, (1024, 255), BUCKETS)
    as_run = place.policies()["bastion:paper"]
    edges = np.searchsorted(BUCKETS, np.arange(1, 257))
    stairs = CostAt(place.released.cycles_s[np.array(BUCKETS)[edges] - 1], 0.0, 1.0)
    for row in published_rows()[8:16]:
        assert (row.table, row.target, row.temperature) == ("bastion", "qwen3-8b", 0)
        blocks = [block for block, _ in draw_rounds(process_of(row), 60, 0)]
        for policy, (low, high) in ((as_run, rows), (PaperBastion(stairs, 255), padded_rows)):
            chosen = [policy.choose(block, CONTEXT, FREE).rows for block in blocks]
            assert low <= np.mean(chosen) <= high


def test_the_released_fit_finds_two_branches_and_weighs_few_rows_most():
    known = paper.TwoBranchCalibration(
        memory_slope=1.2, memory_floor_s=0.002, compute_slope=1.7, compute_floor_s=0.004
    ).over(A6000)
    fitted = fit_released(known, A6000)
    found = (
        fitted.memory_slope, fitted.memory_floor_s, fitted.compute_slope, fitted.compute_floor_s,
    )  # fmt: skip
    assert found == pytest.approx((1.2, 0.002, 1.7, 0.004), rel=0.02)

    curved = truth()  # which no two lines follow
    rows, context = grid(paper.RELEASED_ROWS, paper.RELEASED_CONTEXTS)
    seconds, fitted = curved.predict_s(rows, context), fit_released(curved, A6000)
    weights = (1 + 30 * (rows - 16) / 496) ** -2.0

    def loss(factor):
        slopes = {
            name: getattr(fitted, name) * factor for name in ("memory_slope", "compute_slope")
        }
        changed = fitted.model_copy(update=slopes).over(A6000)
        return float(np.sum(weights * (changed.predict_s(rows, context) - seconds) ** 2))

    assert loss(1.0) < min(loss(0.97), loss(1.03))
    few = np.abs(fitted.predict_s(rows, context) / seconds - 1)[rows <= 64].mean()
    assert few < 0.05
