"""The fit of all-reduces by protocols, against known lines."""

import numpy as np
import pytest

from costmodel.communication import all_reduce_s
from lab.studies.communication import fit_protocols


def test_the_lines_of_two_protocols_are_found():
    """5 us up to 512 KB, then 20 us and 100 GB/s."""
    size = 2.0 ** np.arange(10, 26)
    seconds = np.where(size < 2**19, 5e-6, 20e-6 + size / 100e9)
    first, second = fit_protocols(size, seconds)
    assert (first.from_bytes, second.from_bytes) == (0.0, 2.0**19)
    assert (first.latency_s, first.byte_s) == pytest.approx((5e-6, 0.0), abs=1e-12)
    assert (second.latency_s, second.byte_s) == pytest.approx((20e-6, 1e-11))
    between = np.array([3000.0, 3e6])
    expected = [5e-6, 20e-6 + 3e6 / 100e9]
    assert all_reduce_s([first, second], between) == pytest.approx(expected)
