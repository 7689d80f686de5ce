"""The warm-up cut against cases worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.measure.samples import warmup_length


@pytest.mark.parametrize(
    ("samples", "length"),
    [
        ([1.0, 1.0, 1.0, 1.0, 1.0, 1.0], 0),
        ([9.0, 1.0, 1.01, 1.0, 0.99, 1.0], 1),
        ([9.0, 3.0, 1.0, 1.01, 0.99, 1.0, 1.0, 1.01], 2),
        ([1.0, 9.0, 1.0, 1.0, 1.0, 1.0], 0),  # a late outlier is not warm-up
        ([1.02, 1.0, 1.0, 1.0, 1.0, 1.0], 0),  # 2 % above is within what single samples do
        ([0.5, 1.0, 1.0, 1.0, 1.0, 1.0], 0),  # rising is not warm-up
        ([9.0, 1.0, 1.0], 0),  # too few to tell
        ([6.0, 5.0, 4.0, 1.0, 1.0, 1.0], 3),  # never more than half
    ],
)
def test_warmup_length(samples: list[float], length: int) -> None:
    assert warmup_length(samples) == length


@given(st.lists(st.floats(1e-6, 1e3), max_size=60))
def test_warmup_is_at_most_half(samples: list[float]) -> None:
    assert 0 <= warmup_length(samples) <= len(samples) // 2


def test_steady_noise_is_seldom_taken_for_warmup() -> None:
    generator = np.random.default_rng(3)
    draws = generator.normal(1.0, 0.02, size=(1000, 20))
    assert np.mean([warmup_length(row.tolist()) > 0 for row in draws]) < 0.02
