"""Regret without the noise of the times that it is judged by, and the points in doubt."""

import dataclasses

import numpy as np
import pytest

from costmodel.calibration.choices import (
    doubt,
    likely_regret,
    most_rows_that_pay,
    regret_at_contexts,
)
from costmodel.calibration.points import Points

ROWS = np.array([1, 2, 3, 5, 8, 12, 16, 24, 32])
CONTEXTS = (64, 512, 2048)


def points(seconds: np.ndarray, noise: float) -> Points:
    """One sample a point, as uncertain as `noise`."""
    return Points(
        rows=np.tile(ROWS, len(CONTEXTS)), context=np.repeat(CONTEXTS, len(ROWS)),
        seconds=seconds, mad_s=noise * seconds / 1.4826 / 1.2533, n=1,
    )  # fmt: skip


def true_s() -> np.ndarray:
    """Times that rise from four rows on, and with the context."""
    rise = np.maximum(ROWS, 4.0)[None] + np.array(CONTEXTS)[:, None] / 256
    return 0.005 * rise.ravel()


def averages(model_error: float, noise: float, runs: int = 40) -> tuple[float, float, float, float]:
    """Mean regret at true times, as measured, and as estimated; the share of intervals with it."""
    random, true, rows = np.random.default_rng(5), true_s(), []
    for _ in range(runs):
        predicted = true * np.exp(model_error * random.standard_normal(len(true)))
        seen = points(true * np.exp(noise * random.standard_normal(len(true))), noise)
        real = regret_at_contexts(points(true, 0.0), predicted).mean
        told = likely_regret(seen, predicted)
        low, high = told.interval
        inside = low - 1e-9 <= real <= high + 1e-9
        rows.append((real, regret_at_contexts(seen, predicted).mean, told.mean, inside))
    return tuple(np.mean(rows, axis=0).tolist())


def test_noise_alone_is_no_regret():
    real, measured, told, inside = averages(0.0, 0.03)
    assert real == 0.0
    assert measured > 0.003
    assert told < measured / 3
    assert inside > 0.8


@pytest.mark.parametrize("noise", [0.005, 0.02])
def test_errors_of_the_prediction_are_told(noise):
    real, measured, told, inside = averages(0.05, noise)
    assert real > 0.002
    assert abs(told - real) <= abs(measured - real) + 0.0005
    assert told == pytest.approx(real, rel=0.4)
    assert inside > 0.6


def test_only_points_between_which_the_noise_may_decide_are_in_doubt():
    seconds = true_s()
    score = doubt(points(seconds, 0.02), seconds)
    assert score.sum() > 0
    assert np.all(doubt(points(seconds, 0.0), seconds) == 0)
    # Where a choice of 8 rows is sure, its neighbours are in no doubt.
    assert np.count_nonzero(score == 0) >= 3
    assert score.max() > 5 * score[0]


def test_sizes_that_no_curve_pays_for_are_left_out():
    """Cost in proportion to the rows: by hand, 1 + 9 N / (N + 4) over N + 1 is highest at N = 1."""
    steep = Points(rows=ROWS, context=64, seconds=0.005 * ROWS)
    flat = Points(rows=ROWS, context=64, seconds=np.full(len(ROWS), 0.005))
    assert most_rows_that_pay(steep, 0.0) == 2
    assert 3 <= most_rows_that_pay(steep, 0.25) <= 8
    assert most_rows_that_pay(flat, 0.0) == 32


def test_few_samples_that_agree_by_chance_are_not_certain():
    """Three samples within a thousandth, among points that spread by a tenth."""
    seconds = true_s()
    mad_s = np.where(np.arange(len(seconds)) == 4, 0.0, 0.1 * seconds)
    error = dataclasses.replace(points(seconds, 0.0), mad_s=mad_s, n=3).median_error
    assert error[4] > error[0] / 2 > 0
    assert np.all(Points(rows=[1, 2], context=64, seconds=[1.0, 2.0]).median_error == 0)
