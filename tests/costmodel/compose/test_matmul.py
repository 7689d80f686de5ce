"""Interpolation of matrix products in utilisation."""

import numpy as np
import pytest

from costmodel.catalog import Peaks
from costmodel.compose.matmul import MatmulTable
from costmodel.errors import InputError

PEAKS = Peaks(flops_per_s=100e12, bytes_per_s=1e12)
ROWS = np.array([1.0, 16.0, 128.0, 1024.0])


def roof_s(m, n, k):
    """By hand: the larger of FLOPs and bytes over their peaks, bfloat16."""
    return np.maximum(2 * m * n * k / 100e12, 2 * (n * k + m * n + m * k) / 1e12)


def table(shapes, factor=1.25, l2_bytes=1):
    curves = {(n, k): (ROWS, factor * roof_s(ROWS, n, k)) for n, k in shapes}
    return MatmulTable(shapes=curves, peaks=PEAKS, l2_bytes=l2_bytes)


GRID = [(n, k) for n in (1024, 4096, 16384) for k in (1024, 4096)]


@pytest.mark.parametrize("shape", [(4096, 4096), (6144, 2560), (28672, 4096), (1024, 1500)])
def test_constant_utilisation_is_exact_at_any_shape(shape):
    seconds = table(GRID).seconds(ROWS, *shape)
    assert seconds == pytest.approx(1.25 * roof_s(ROWS, *shape), rel=1e-4)
    # Also from few scattered shapes, and beyond the last row count.
    few = table([(4096, 4096), (1024, 2048), (4096, 14336)])
    assert few.seconds(ROWS, 2560, 4096) == pytest.approx(1.25 * roof_s(ROWS, 2560, 4096))
    assert table(GRID).seconds([4096], *shape) == pytest.approx(1.25 * roof_s(4096, *shape))


def test_measured_points_come_back_unless_their_weights_lay_in_the_cache():
    shapes = {(4096, 4096): (np.array([1.0, 3.0]), np.array([1e-3, 3e-3]))}
    made = MatmulTable(shapes=shapes, peaks=PEAKS, l2_bytes=1)
    assert made.seconds([1, 2, 3], 4096, 4096) == pytest.approx([1e-3, 2e-3, 3e-3])
    assert table(GRID).left_out_error() < 0.01
    assert table(GRID[:2]).left_out_error() == 0.2
    shapes = {
        (16384, 4096): (ROWS, 1.25 * roof_s(ROWS, 16384, 4096)),
        (1024, 1024): (ROWS, 0.1 * roof_s(ROWS, 1024, 1024)),
    }
    made = MatmulTable(shapes=shapes, peaks=PEAKS, l2_bytes=4 * 2**20)
    read_s = 2 * 1024 * 1024 / made.read_bytes_per_s
    assert made.read_bytes_per_s == pytest.approx(0.8e12, rel=0.01)
    assert made.seconds([1], 1024, 1024)[0] == pytest.approx(read_s)


def test_a_wider_matrix_repeats_the_tiles_of_the_widest():
    """The LM head of Gemma 3, 262,208 wide, is 4.001 times the widest measured product."""
    made = table(GRID)
    widest = max(n for n, _ in GRID)
    for factor in (5, 8):
        share = made.seconds(ROWS, widest, 4096) / roof_s(ROWS, widest, 4096)
        wide = made.seconds(ROWS, factor * widest, 4096) / roof_s(ROWS, factor * widest, 4096)
        assert wide == pytest.approx(share, rel=1e-3)
    made.seconds(ROWS, 8 * widest, 4096)
    with pytest.raises(InputError, match="n = 131073, k = 4096 lies too far"):
        made.seconds(ROWS, 8 * widest + 1, 4096)
