"""Intervals that hold the truth as often as they say, also for a series that remembers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.signal import lfilter

from costmodel.errors import InputError
from lab.studies.batch_means import mean_estimate, percentile_estimate


def remembering(count: int, generator: np.random.Generator) -> np.ndarray:
    """Standard normal values with a correlation of 0.9 from one to the next."""
    noise = generator.standard_normal(count) * math.sqrt(1 - 0.81)
    return lfilter([1.0], [1.0, -0.9], noise)[1000:]


def test_intervals_hold_the_truth_in_about_95_of_100_runs() -> None:
    generator = np.random.default_rng(0)
    runs = [remembering(21_000, generator) for _ in range(300)]
    means = [mean_estimate(run) for run in runs]
    tails = [percentile_estimate(run, 90) for run in runs]
    truth = 1.2815515655446004  # the 90th percentile of a standard normal
    assert np.mean([e.low < 0 < e.high for e in means]) == pytest.approx(0.95, abs=0.04)
    assert np.mean([e.low < truth < e.high for e in tails]) == pytest.approx(0.95, abs=0.04)


def test_an_interval_that_ignores_the_memory_would_be_too_narrow() -> None:
    run = remembering(21_000, np.random.default_rng(1))
    naive = 1.96 * np.std(run) / math.sqrt(len(run))
    found = mean_estimate(run)
    assert found.high - found.value > 2 * naive


def test_the_value_is_that_of_all_values() -> None:
    values = np.arange(1007.0)
    assert mean_estimate(values).value == 503.0
    assert percentile_estimate(values, 50).value == 503.0
    assert percentile_estimate(values, 100).value == 1006.0


def test_a_constant_series_has_no_width() -> None:
    found = percentile_estimate(np.full(500, 3.0), 99)
    assert (found.low, found.value, found.high) == (3.0, 3.0, 3.0)


def test_too_few_values_give_no_interval() -> None:
    found = mean_estimate(np.ones(199))
    assert found.value == 1
    assert math.isnan(found.low)
    assert math.isnan(found.high)


@pytest.mark.parametrize("percent", [-1, 101, math.nan])
def test_bad_percentiles(percent: float) -> None:
    with pytest.raises(InputError, match="a percentile must be from 0 to 100"):
        percentile_estimate([1.0], percent)


def test_no_values() -> None:
    with pytest.raises(InputError, match="no values"):
        mean_estimate([])
