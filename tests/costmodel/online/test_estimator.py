"""The cost of a cycle from a profile, and its correction while decoding."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from costmodel.errors import ProfileError
from costmodel.online import CycleCost, OnlineEstimator
from costmodel.profile.profile import Profile
from costmodel.profile.schema import StagesSection
from tests.costmodel.conftest import ROOFLINE, altered

STORED = Path(__file__).parents[1] / "data/profile.yaml"


@pytest.fixture
def cost(profile) -> CycleCost:
    return CycleCost.from_profile(profile, "ngram-1")


def test_a_cycle_is_the_sum_of_its_parts_and_the_plain_step_is_the_measured_one(cost, profile):
    nodes = np.array([1, 15, 40])
    verify_s = profile.verify_calibration().predict_s(nodes + 1, 544)
    assert cost.verify_s(nodes, 544) == pytest.approx(verify_s)
    # half way between 64 (0.1 ms) and 1024 (0.3 ms)
    assert cost.draft_s(544) == pytest.approx(2e-4)
    build = np.array([3e-6, 5e-6, 5e-6 + 3e-6 * 25 / 48])
    accept = np.array([1e-4, 1.2e-4, 1.2e-4 + 0.8e-4 * 25 / 48])
    # 4 tokens are committed, or 2 where the tree has one node
    commit = np.array([1e-5 + 1e-5 / 3, 2e-5, 2e-5])
    assert cost.overhead_s(nodes) == pytest.approx(build + accept + commit)
    assert cost.cycle_s(nodes, 544) == pytest.approx(verify_s + 2e-4 + build + accept + commit)
    assert cost.cycle_s(7, 544).shape == ()
    assert cost.plain_s(64) == pytest.approx(0.049)
    assert cost.plain_s(544) == pytest.approx(0.0525)
    # beyond the last context its slope goes on, before the first it is level
    assert cost.plain_s(1984) == pytest.approx(0.063)
    assert cost.plain_s(0) == pytest.approx(0.049)
    # batch 2 was not measured: a verification of the root alone
    assert cost.plain_s(64, 2) == pytest.approx(float(cost.verify_s(0, 64, 2)))


def test_what_was_not_measured_costs_nothing_and_buckets_pad_rows(profile):
    bare = profile.model_copy(update={"stages": StagesSection(), "drafters": {}})
    cost = CycleCost.from_profile(bare)
    assert cost.draft_s(100) == 0
    assert cost.overhead_s([1, 2]).tolist() == [0, 0]
    assert cost.plain_s(100) == pytest.approx(float(cost.verify_s(0, 100)))
    with pytest.raises(ProfileError, match=r"ngram-1 \(ngram\)"):
        CycleCost.from_profile(profile, "dflash")
    profile = Profile.from_yaml(STORED)
    cost = CycleCost.from_profile(profile)
    assert cost.buckets == (1, 16, 64, 128)
    padded = {0: 1, 1: 16, 14: 16, 15: 16, 16: 64, 63: 64, 127: 128, 128: 129, 500: 501}
    assert cost.bucket_rows([*padded]).tolist() == [*padded.values()]
    padded_s = profile.verify_calibration().predict_s([16, 16, 64, 128], 256)
    assert cost.verify_s([3, 15, 50, 100], 256) == pytest.approx(padded_s)
    # The 3, 15, 18 and 384 rows of three texts are padded together.
    together_s = profile.verify_calibration().predict_s(np.array([16, 16, 64, 384]) / 3, 256, 3)
    assert cost.verify_s(np.array([0, 12, 15, 381]) / 3, 256, 3) == pytest.approx(together_s)


def test_sampling_has_its_own_acceptance_cost(profile):
    slow = profile.stages.accept.model_copy(update={"median_s": (1e-2,) * 4})
    both = altered(profile, stages={"accept_sampled": slow})
    cost, without = CycleCost.from_profile(both), CycleCost.from_profile(profile)
    dearer = cost.overhead_s(15, sampled=True) - cost.overhead_s(15)
    assert float(dearer) == pytest.approx(1e-2 - 1.2e-4)
    assert cost.cycle_s(15, 100, sampled=True) - cost.cycle_s(15, 100) == pytest.approx(dearer)
    # where it was not measured the other one serves
    assert without.overhead_s(15, sampled=True) == without.overhead_s(15)
    estimator = OnlineEstimator(cost)
    greedy = estimator.cycle_s([3.0, 15.0], 100)
    estimator.sampled = True
    slow = estimator.cycle_s([3.0, 15.0], 100)
    assert slow[1] - greedy[1] == pytest.approx(dearer)
    estimator.sampled = False
    assert estimator.cycle_s([3.0, 15.0], 100).tolist() == greedy.tolist()


def test_static_never_changes_and_a_bare_roofline_is_a_cost(cost):
    estimator = OnlineEstimator(cost)
    for _ in range(10):
        estimator.observe(17, 304, 1.0)
    assert np.array_equal(estimator.cycle_s(np.arange(64), 304), cost.cycle_s(np.arange(64), 304))
    assert estimator.plain_s(304) == cost.plain_s(304)
    cost = CycleCost.from_roofline(ROOFLINE.with_count("physical"), (1, 8))
    expected = ROOFLINE.seconds([1, 8], 100)
    assert cost.verify_s([0, 4], 100) == pytest.approx(expected)
    assert cost.cycle_s(0, 100) == pytest.approx(expected[0])


@pytest.mark.parametrize("mode", ["static", "ema+calib", "affine"])
def test_costs_are_those_at_the_middle_of_32_tokens(cost, mode):
    estimator, nodes = OnlineEstimator(cost, mode), np.arange(64.0)
    for context in (288, 304, 319):
        assert np.array_equal(estimator.cycle_s(nodes, context), cost.cycle_s(nodes, 304))
        assert estimator.plain_s(context) == cost.plain_s(304)
        assert estimator.draft_s(context) == cost.draft_s(304)
    assert np.array_equal(estimator.cycle_s(nodes, 320), cost.cycle_s(nodes, 336))
    assert np.array_equal(estimator.cycle_s(nodes, 304, 2), cost.cycle_s(nodes, 304, 2))
    assert np.array_equal(estimator.cycle_s(nodes[:4], 304), cost.cycle_s(nodes[:4], 304))
    np.testing.assert_allclose(cost.cycle_s(nodes, 288), cost.cycle_s(nodes, 304), rtol=4e-3)


def test_ema_over_the_roofline_and_over_the_calibration_by_hand(cost):
    estimator = OnlineEstimator(cost, "ema", alpha=0.25)
    bare = float(cost.roofline.seconds(17, 304))
    assert float(estimator.verify_s(16, 304)) == pytest.approx(bare)
    estimator.observe(17, 304, 3 * bare)
    assert estimator.bias == pytest.approx(3)  # the first ratio itself
    estimator.observe(17, 304, 2 * bare)
    assert estimator.bias == pytest.approx(0.75 * 3 + 0.25 * 2)
    assert float(estimator.verify_s(16, 304)) == pytest.approx(2.75 * bare)
    assert estimator.plain_s(304) == pytest.approx(2.75 * float(cost.roofline.seconds(1, 304)))
    assert estimator.observations == 2
    estimator = OnlineEstimator(cost, "ema+calib", alpha=0.25)
    calibrated = float(cost.verify_s(16, 304))
    estimator.observe(17, 304, 2 * calibrated)
    assert estimator.bias == pytest.approx(0.75 * 1 + 0.25 * 2)
    assert float(estimator.verify_s(16, 304)) == pytest.approx(1.25 * calibrated)
    assert estimator.plain_s(304) == pytest.approx(1.25 * cost.plain_s(304))
    # the rest of the cycle is not verification and stays
    rest = cost.draft_s(304) + float(cost.overhead_s(16))
    assert float(estimator.cycle_s(16, 304)) == pytest.approx(1.25 * calibrated + rest)
    assert estimator.draft_s(304) == cost.draft_s(304)


@pytest.mark.parametrize(("most", "rows", "sizes"), [
    (3, {}, [0, 1, 2, 3]),
    (7, {"buckets": (1, 4, 8, 16)}, [0, 3, 7]),
    (9, {"buckets": (1, 4, 8, 16)}, [0, 3, 7, 9]),
    (2, {"buckets": (1, 4, 8, 16)}, [0, 2]),
    (0, {"buckets": (1, 4, 8, 16)}, [0]),
    (4, {"preferred_rows": (1, 2, 3, 6)}, [0, 1, 2]),
    (5, {"preferred_rows": (1, 2, 3, 6)}, [0, 1, 2, 5]),
])  # fmt: skip
def test_sizes_are_full_buckets_preferred_rows_or_all(cost, most, rows, sizes):
    rows = {"buckets": (), "preferred_rows": ()} | rows
    assert dataclasses.replace(cost, **rows).sizes(most).tolist() == sizes


@pytest.mark.parametrize(("device", "provenance", "rows_only"), [
    ("cpu", "measured", True), ("cpu", "quick", False), ("cuda", "measured", False),
])  # fmt: skip
def test_a_measured_cpu_prefers_its_measured_rows(profile, device, provenance, rows_only):
    changed = altered(profile, device={"kind": device}, provenance={"kind": provenance})
    preferred = CycleCost.from_profile(changed).preferred_rows
    assert preferred == (tuple(sorted(set(profile.surface.rows))) if rows_only else ())
