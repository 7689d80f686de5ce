"""Robust statistics against numpy, scipy and cases worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from costmodel.statistics import mad_s, median_interval_s, relative_error, relative_spread


def test_mad_by_hand() -> None:
    # Deviations from the median 3 are 2, 1, 0, 1, 97: their median is 1.
    assert mad_s([1.0, 2.0, 3.0, 4.0, 100.0]) == 1.0


@pytest.mark.parametrize("count", [0, 1, 2])
def test_too_few_samples_have_no_spread(count: int) -> None:
    samples = [1.0] * count
    assert mad_s(samples) is None
    assert relative_spread(samples) is None
    assert relative_error(samples) is None


@given(st.lists(st.floats(1e-6, 1e3), min_size=3, max_size=40))
def test_mad_agrees_with_scipy(samples: list[float]) -> None:
    assert mad_s(samples) == pytest.approx(stats.median_abs_deviation(samples))


@pytest.mark.parametrize(
    ("count", "rank"),
    # Ranks of the 95 % interval of the median from the sign test's published tables.
    [(6, 1), (8, 1), (9, 2), (11, 2), (12, 3), (15, 4), (17, 5), (20, 6), (25, 8), (30, 10)],
)
def test_interval_ranks_match_the_tables(count: int, rank: int) -> None:
    samples = [float(value) for value in range(1, count + 1)]
    assert median_interval_s(samples) == (rank, count + 1 - rank)


def test_interval_is_unavailable_below_six_samples() -> None:
    assert median_interval_s([1.0, 2.0, 3.0, 4.0, 5.0]) is None


@pytest.mark.parametrize("count", [6, 13, 31])
def test_interval_covers_the_median_of_a_skewed_distribution(count: int) -> None:
    generator = np.random.default_rng(7)
    draws = generator.lognormal(0.0, 1.0, size=(2000, count))
    covered = 0
    for row in draws:
        interval = median_interval_s(row.tolist())
        assert interval is not None
        covered += interval[0] <= 1.0 <= interval[1]
    assert covered / 2000 >= 0.94


def test_relative_error_estimates_the_spread_of_medians() -> None:
    generator = np.random.default_rng(11)
    draws = generator.normal(10.0, 0.4, size=(1500, 41))
    true_error = np.median(draws, axis=1).std() / 10.0
    estimated = np.median([relative_error(row.tolist()) for row in draws])
    assert estimated == pytest.approx(true_error, rel=0.1)
