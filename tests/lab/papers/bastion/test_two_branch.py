"""The two-branch calibration and its released fit against known truths."""

import numpy as np
import pytest

from lab.papers.bastion.policy import (
    RELEASED_CONTEXTS,
    RELEASED_ROWS,
    TwoBranchCalibration,
    fit_released,
)
from tests.costmodel.calibration.test_physical import truth
from tests.costmodel.conftest import A6000, grid


def test_the_released_fit_finds_two_branches_and_weighs_few_rows_most():
    known = TwoBranchCalibration(
        memory_slope=1.2, memory_floor_s=0.002, compute_slope=1.7, compute_floor_s=0.004
    ).over(A6000)
    fitted = fit_released(known, A6000)
    found = (
        fitted.memory_slope, fitted.memory_floor_s, fitted.compute_slope, fitted.compute_floor_s,
    )  # fmt: skip
    assert found == pytest.approx((1.2, 0.002, 1.7, 0.004), rel=0.02)

    curved = truth()  # which no two lines follow
    rows, context = grid(RELEASED_ROWS, RELEASED_CONTEXTS)
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
