"""Calibrations against known truths, published measurements and hand-worked statistics."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from costmodel.calibration.linear import fit_linear
from costmodel.calibration.points import ErrorSummary, Points
from costmodel.calibration.selection import select_calibration, smoothed_steps
from costmodel.errors import InputError
from tests.costmodel import conftest as made
from tests.costmodel.conftest import FORWARDS, ROOFLINE, cpu_points, cpu_seconds, grid, stairs_of

# tests/data/SOURCES.md: MAPE in per cent of the bare roofline and of one linear calibration
PUBLISHED = dict(zip(FORWARDS, ((28.0, 12.5), (14.2, 7.3), (17.9, 4.6), (30.5, 7.8)), strict=True))


@pytest.mark.parametrize("name", PUBLISHED)
def test_linear_calibration_of_published_forwards(name):
    points, roofline = made.measured_points(name)
    linear = fit_linear(points, roofline)
    bare, fitted = PUBLISHED[name]
    assert 100 * linear.mape_before == pytest.approx(bare, abs=0.06)
    assert 100 * linear.mape_after == pytest.approx(fitted, abs=0.06)
    assert linear.rmse_after_s < linear.rmse_before_s


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_calibrations_of_published_forwards_predict_points_left_out(name):
    selection = select_calibration(*made.measured_points(name))
    assert selection.selected == "stairs"
    assert selection.cross_validated["stairs"].mape < 0.004
    assert selection.cross_validated["linear"].mape > 0.045


def line_points(slope, intercept_s, noise=0.0) -> Points:
    rows, context = grid([1, 4, 16, 64, 256], [64, 1024, 4096])
    true_s = slope * ROOFLINE.seconds(rows, context) + intercept_s
    factor = 1 + noise * np.random.default_rng(0).standard_normal(len(rows))
    return Points(rows=rows, context=context, seconds=true_s * factor)


def test_a_step_that_the_fit_smooths_over_is_named():
    """From 4 to 5 rows 2.5 times the time, where all of them read the weights once."""
    rows = np.array([1, 2, 4, 5, 8, 16] * 2)
    context = np.repeat([64, 1024], 6)

    def true_s(rows, context, batch=1):
        bound_s = ROOFLINE.with_count("physical").seconds(rows, context, batch)
        return np.where(rows > 4, 5.0, 2.0) * bound_s

    points = Points(rows=rows, context=context, seconds=true_s(rows, context))
    (said,) = smoothed_steps(points, fit_linear(points, ROOFLINE), ROOFLINE)
    assert said.startswith("from 4 to 5 rows on ") and "the time rises by 15" in said
    assert smoothed_steps(points, SimpleNamespace(predict_s=true_s), ROOFLINE) == ()
    far = points.take((rows != 5) & (rows != 2))  # twice the rows, 2.5 times the time
    assert smoothed_steps(far, fit_linear(far, ROOFLINE), ROOFLINE)[0].startswith("from 4 to 8")
    noisy = dataclasses.replace(points, mad_s=points.seconds, n=5)
    assert smoothed_steps(noisy, fit_linear(points, ROOFLINE), ROOFLINE) == ()


def test_statistics_are_those_of_scipy():
    x, added_s = ROOFLINE.seconds([1, 64, 256], 64), np.array([0.01, 0.02, 0.06])
    y = x + added_s
    linear = fit_linear(Points(rows=[1, 64, 256], context=[64] * 3, seconds=y), ROOFLINE)
    line = stats.linregress(x, y)
    fitted = linear.slope, linear.intercept_s, linear.slope_se
    assert fitted == pytest.approx((line.slope, line.intercept, line.stderr))
    residual = y - line.slope * x - line.intercept
    assert linear.rmse_before_s == pytest.approx(np.sqrt((added_s**2).mean()))
    assert linear.rmse_after_s == pytest.approx(np.sqrt((residual**2).mean()))
    assert linear.mape_before == pytest.approx((added_s / y).mean())


def test_standard_errors_cover_the_truth():
    inside = 0
    for seed in range(200):
        clean = line_points(1.8, 0.02)
        noise = 0.004 * np.random.default_rng(seed).standard_normal(len(clean))
        noisy = dataclasses.replace(clean, seconds=np.maximum(clean.seconds + noise, 1e-3))
        linear = fit_linear(noisy, ROOFLINE)
        inside += abs(linear.slope - 1.8) < 2.16 * linear.slope_se  # t, 13 degrees, 95 %
    assert 180 <= inside <= 199


def test_a_line_neither_falls_nor_predicts_less_than_the_physical_bound():
    points = Points(rows=[1, 2, 4, 8], context=[64] * 4, seconds=[0.0271, 0.0270, 0.0269, 0.0268])
    linear = fit_linear(points, ROOFLINE)
    assert linear.slope == 0
    assert linear.intercept_s == pytest.approx(0.02695)
    linear = fit_linear(line_points(5.0, -0.08), ROOFLINE)
    assert linear.intercept_s < 0
    bound = ROOFLINE.with_count("physical").seconds([1, 2], 0)
    assert np.all(linear.predict_s([1, 2], 0) >= bound)


@pytest.mark.parametrize(("changes", "message"), [
    ({"rows": [1, 2], "context": [1, 1], "seconds": [1.0, 2.0]}, "at least 3 points"),
    ({"rows": [4, 4, 4]}, "same roofline time"),
])  # fmt: skip
def test_points_that_cannot_be_fitted(changes, message):
    good = {"rows": [1, 2, 4], "context": [64, 64, 64], "seconds": [0.1, 0.2, 0.3]}
    with pytest.raises(InputError, match=message):
        fit_linear(Points(**(good | changes)), ROOFLINE)


@pytest.mark.parametrize(("noise", "median", "worst"), [(0.0, 0.005, 0.08), (0.02, 0.015, 0.08)])
def test_stairs_predict_between_their_points(noise, median, worst):
    fitted = stairs_of(cpu_points(noise), ROOFLINE)
    rng = np.random.default_rng(7)
    rows = np.round(np.exp(rng.uniform(0, np.log(256), 300)))
    context = np.round(np.exp(rng.uniform(np.log(64), np.log(2048), 300)))
    error = ErrorSummary.of(fitted.predict_s(rows, context), cpu_seconds(rows, context))
    assert error.median < median
    assert error.worst < worst


def test_exact_points_with_real_steps_and_falls_are_returned():
    """Sums of operator tables have no noise: none of them is smoothed or left out."""
    rows = [1, 32, 33, 64, 65, 96, 97, 127, 128, 256]
    rows, context = grid(rows, [64, 300, 1024])
    # 32-row tiles, and a real fall at 128 rows, where another kernel takes over.
    falling_s = 0.010 + 0.002 * np.ceil(rows / 32) - 0.004 * (rows >= 128) + 1e-6 * context
    for true_s in (falling_s, cpu_seconds(rows, context)):
        fitted = stairs_of(Points(rows=rows, context=context, seconds=true_s), ROOFLINE, exact=True)
        assert fitted.predict_s(rows, context) == pytest.approx(true_s, rel=1e-3)


@st.composite
def ragged(draw, fewest, most):
    """Some points of a grid, and a generator for times without any order."""
    row_set = draw(st.sets(st.integers(1, 600), min_size=3, max_size=12))
    context_set = draw(st.sets(st.integers(0, 9000), min_size=1, max_size=5))
    rows, context = grid(sorted(row_set), sorted(context_set))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    chosen = random.permutation(len(rows))[: draw(st.integers(fewest, most))]
    return rows[chosen], context[chosen], random


@settings(max_examples=25)
@given(ragged(6, 60), st.booleans())
def test_between_measured_rows_nothing_overshoots(shapes, exact):
    rows, context, random = shapes
    if len(rows) < 6 or len(np.unique(rows)) < 2:
        return
    points = Points(rows=rows, context=context, seconds=random.uniform(0.01, 1.0, len(rows)))
    try:
        fitted = stairs_of(points, ROOFLINE, exact)
    except InputError as error:  # times that fall with the rows may be no sum of work at all
        assert "no sum of physical work fits the points" in str(error)
        return
    knots = np.unique(points.rows)
    every = np.arange(knots[0], knots[-1] + 1)
    for one in (*np.unique(context), 20_000):
        at_knots, predicted = fitted.predict_s(knots, one), fitted.predict_s(every, one)
        assert np.all(np.isfinite(predicted)) and np.all(predicted > 0)
        upper = np.clip(np.searchsorted(knots, every), 1, len(knots) - 1)
        low = np.minimum(at_knots[upper - 1], at_knots[upper])
        high = np.maximum(at_knots[upper - 1], at_knots[upper])
        assert np.all(predicted >= low * (1 - 1e-9)) and np.all(predicted <= high * (1 + 1e-9))


def test_each_point_is_predicted_by_a_fit_without_it():
    points = cpu_points(0.02).take(np.arange(0, 56, 7))
    selection = select_calibration(points, ROOFLINE)
    for index, predicted_s in enumerate(selection.predicted_left_out_s["linear"]):
        fitted = fit_linear(points.take(np.arange(len(points)) != index), ROOFLINE)
        assert predicted_s == pytest.approx(
            fitted.predict_s(points.rows[index], points.context[index])
        )


def test_selection_prefers_what_predicts_better_and_three_points_are_enough_for_a_line():
    curved = made.usual_selection()
    assert curved.selected == "stairs" and curved.calibration is curved.stairs
    assert curved.cross_validated["stairs"].mape < curved.cross_validated["linear"].mape
    chosen = select_calibration(line_points(1.8, 0.02, noise=0.05), ROOFLINE)
    assert chosen.selected == "linear" and chosen.calibration is chosen.linear
    points = Points(rows=[1, 16, 64], context=[64] * 3, seconds=[0.05, 0.064, 0.142])
    selection = select_calibration(points, ROOFLINE)
    assert selection.selected == "linear" and selection.physical is selection.stairs is None


@pytest.mark.slow
@settings(max_examples=10)
@given(ragged(4, 12))
def test_any_points_have_a_selection(shapes):
    rows, context, random = shapes
    batch, seconds = random.integers(1, 9, len(rows)), 10 ** random.uniform(-4, 1, len(rows))
    points = Points(rows=rows, context=context, batch=batch, seconds=seconds)
    selection = select_calibration(points, ROOFLINE)
    predicted = selection.calibration.predict_s(np.array([1, 7, 300]), 500)
    assert np.all(np.isfinite(predicted)) and np.all(predicted > 0)


def test_each_measured_width_has_its_own_price_or_is_named():
    """A hybrid of 27B in AWQ on an RTX A6000 by rows, whose kernel takes 8 at most: field notes."""
    rows, seconds = [8, 9, 10, 13, 17, 33], [0.0538, 0.0608, 0.0620, 0.0620, 0.0632, 0.0725]
    few = select_calibration(Points(rows=rows, context=[500] * 6, seconds=seconds), ROOFLINE)
    assert len(few.warnings) == 1 and few.warnings[0].startswith("from 8 to 9 rows")
    context = np.repeat([256, 1024, 4096], 6)
    points = Points(rows=rows * 3, context=context, seconds=np.tile(seconds, 3) + 2e-7 * context)
    whole = select_calibration(points, ROOFLINE)
    assert whole.calibration.predict_s(rows * 3, context) == pytest.approx(points.seconds, rel=2e-3)
    assert whole.warnings == ()
