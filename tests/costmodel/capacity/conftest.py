"""Fixture `tables`: made-up operator tables whose times are simple formulas."""

from __future__ import annotations

import numpy as np
import pytest

from costmodel.compose.attention import Attention, TileForm
from costmodel.compose.matmul import MatmulTable
from costmodel.compose.serving_tables import Precision, ServingTables
from costmodel.device import find_device

DEVICE = find_device("h100-sxm")
ROWS = np.array([1.0, 16.0, 1024.0, 16384.0])
# Every product takes this long plus so much for each row, whatever its shape.
PRODUCT_S, ROW_S = 1e-3, 1e-6


def product_table() -> MatmulTable:
    """Linear in the rows, the same for shapes from 1024 to 131,072."""
    shapes = {
        (n, k): (ROWS, PRODUCT_S + ROW_S * ROWS) for n in (1024, 131072) for k in (1024, 32768)
    }
    sizes = (1024, 4096, 6144, 28672, 128256)
    shapes |= {(n, k): (ROWS, PRODUCT_S + ROW_S * ROWS) for n in sizes for k in (4096, 14336)}
    return MatmulTable(shapes=shapes, peaks=DEVICE.peaks, l2_bytes=DEVICE.l2_bytes)


@pytest.fixture
def tables() -> ServingTables:
    """Attention of one row takes 1 ms a sequence, of a prompt 1 us a token."""
    batches, tokens = (1, 2, 4, 8, 256), (1, 1024, 16384)
    return ServingTables(
        device=DEVICE,
        source="made up",
        precision=Precision(),
        head_dim=128,
        products=(product_table(),),
        head=(product_table(),),
        attention=Attention(
            generation={(32, 8): {(b, t): 1e-3 * b for b in batches for t in tokens}},
            context={(32, 8): {(1, t): 1e-6 * t for t in tokens}},
            form=TileForm(tile_rows=128),
            sm_count=132,
            key_s=1e-9,
            busy_key_s=1e-9,
        ),
        all_reduce={
            2: (
                (np.array([1.0, 1e9]), np.array([2e-6, 2e-6])),
                (np.array([1.0, 1e9]), np.array([1e-6, 1e-6])),
            )
        },
    )
