"""The two-branch calibration and its released fit against known truths."""

import numpy as np
import pytest

from costmodel.calibration.points import Points
from costmodel.catalog import find_device, find_target
from costmodel.roofline import Roofline
from lab.papers.bastion.two_branch import (
    RELEASED_CONTEXTS,
    RELEASED_ROWS,
    TwoBranchCalibration,
    fit_released,
    fit_two_branch,
)
from tests.costmodel.calibration.test_physical import CONTEXTS, ROWS, truth


@pytest.fixture
def roofline() -> Roofline:
    return Roofline(
        architecture=find_target("Llama-3.1-8B-Instruct").architecture,
        peaks=find_device("rtx-a6000").peaks,
    )


def test_two_branches_are_found(roofline):
    compute_s, memory_s = roofline.branches_s(*(x.ravel() for x in np.meshgrid(ROWS, CONTEXTS)))
    seconds = np.maximum(1.2 * memory_s + 0.002, 1.7 * compute_s + 0.004)
    r, c = (x.ravel() for x in np.meshgrid(ROWS, CONTEXTS))
    fitted = fit_two_branch(Points(rows=r, context=c, seconds=seconds), roofline)
    found = (
        fitted.memory_slope, fitted.memory_floor_s, fitted.compute_slope, fitted.compute_floor_s,
    )  # fmt: skip
    assert found == pytest.approx((1.2, 0.002, 1.7, 0.004), rel=0.02)
    assert fitted.predict_s(r, c) == pytest.approx(seconds, rel=1e-3)


def test_the_released_fit_finds_two_branches_and_weighs_few_rows_most(roofline):
    known = TwoBranchCalibration(
        memory_slope=1.2, memory_floor_s=0.002, compute_slope=1.7, compute_floor_s=0.004
    ).over(roofline)
    fitted = fit_released(known, roofline)
    found = (
        fitted.memory_slope, fitted.memory_floor_s, fitted.compute_slope, fitted.compute_floor_s,
    )  # fmt: skip
    assert found == pytest.approx((1.2, 0.002, 1.7, 0.004), rel=0.02)

    curved = truth(roofline)  # which no two lines follow
    rows, context = (x.ravel() for x in np.meshgrid(RELEASED_ROWS, RELEASED_CONTEXTS))
    seconds, fitted = curved.predict_s(rows, context), fit_released(curved, roofline)
    weights = (1 + 30 * (rows - 16) / 496) ** -2.0

    def loss(factor):
        slopes = {
            name: getattr(fitted, name) * factor for name in ("memory_slope", "compute_slope")
        }
        changed = fitted.model_copy(update=slopes).over(roofline)
        return float(np.sum(weights * (changed.predict_s(rows, context) - seconds) ** 2))

    assert loss(1.0) < min(loss(0.97), loss(1.03))
    few = np.abs(fitted.predict_s(rows, context) / seconds - 1)[rows <= 64].mean()
    assert few < 0.05


def test_one_branch_alone_can_be_stored(roofline):
    """As a start-up probe on a busy machine may find it."""
    r, c = (x.ravel() for x in np.meshgrid(ROWS, CONTEXTS))
    compute_s, memory_s = roofline.branches_s(r, c)
    slope = float(2 * np.max(memory_s / compute_s))  # above every bound
    alone = TwoBranchCalibration(
        memory_slope=0.0, memory_floor_s=0.0, compute_slope=slope, compute_floor_s=0.0
    )
    stored = TwoBranchCalibration.model_validate(alone.model_dump()).over(roofline)
    assert stored == alone
    assert stored.predict_s(r, c) == pytest.approx(slope * compute_s)
    with pytest.raises(ValueError, match="at least one of the coefficients"):
        TwoBranchCalibration(memory_slope=0, memory_floor_s=0, compute_slope=0, compute_floor_s=0)


@pytest.mark.parametrize("target", ["Llama-3.1-8B-Instruct", "Qwen/Qwen3-30B-A3B"])
def test_nothing_is_predicted_faster_than_the_physical_bound(target):
    """Points exactly at the bound, few of them, so that fits would fall below it elsewhere."""
    roofline = Roofline(
        architecture=find_target(target).architecture, peaks=find_device("rtx-a6000").peaks
    )
    bound = roofline.with_count("physical")
    r, c = (x.ravel() for x in np.meshgrid([1, 4, 16, 40], [64, 512, 1024]))
    points = Points(rows=r, context=c, seconds=bound.seconds(r, c) * (1 + 1e-9))
    rows, context = (x.ravel() for x in np.meshgrid([1, 2, 30, 100, 1000], [1, 100, 4000]))
    fitted = fit_two_branch(points, roofline).predict_s(rows, context)
    assert np.all(fitted >= bound.seconds(rows, context) * (1 - 1e-12))
