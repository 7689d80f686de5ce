"""Robust statistics against numpy, scipy and cases worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from costmodel.statistics import extend_linear, mad_s, relative_error, relative_spread


@pytest.mark.parametrize("count", [0, 1, 2])
def test_too_few_samples_have_no_spread(count: int) -> None:
    samples = [1.0] * count
    assert mad_s(samples) is None
    assert relative_spread(samples) is None
    assert relative_error(samples) is None


@given(st.lists(st.floats(1e-6, 1e3), min_size=3, max_size=40))
def test_mad_agrees_with_scipy(samples: list[float]) -> None:
    assert mad_s(samples) == pytest.approx(stats.median_abs_deviation(samples))


def test_relative_error_is_the_spread_of_medians_and_no_extension_falls() -> None:
    generator = np.random.default_rng(11)
    draws = generator.normal(10.0, 0.4, size=(1500, 41))
    true_error = np.median(draws, axis=1).std() / 10.0
    estimated = np.median([relative_error(row.tolist()) for row in draws])
    assert estimated == pytest.approx(true_error, rel=0.1)
    assert extend_linear([1, 3], [2.0, 4.0], [0, 1, 2, 3, 5]).tolist() == [2, 2, 3, 4, 6]
    assert extend_linear([1, 3], [4.0, 2.0], [3, 9]).tolist() == [2, 2]
    assert extend_linear([5], [7.0], [0, 9]).tolist() == [7, 7]
