"""The two-branch calibration and its released fit against known truths."""

import numpy as np
import pytest

from costmodel.catalog import find_device, find_target
from costmodel.roofline import Roofline
from lab.papers.bastion.policy import (
    RELEASED_CONTEXTS,
    RELEASED_ROWS,
    TwoBranchCalibration,
    fit_released,
)
from tests.costmodel.calibration.test_physical import truth


@pytest.fixture
def roofline() -> Roofline:
    return Roofline(
        architecture=find_target("Llama-3.1-8B-Instruct").architecture,
        peaks=find_device("rtx-a6000").peaks,
    )


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
