"""Made-up operator tables, step times and acceptance whose numbers are simple formulas."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from costmodel.architecture import ModelArchitecture
from costmodel.catalog import find_device
from costmodel.compose.attention import Attention, TileForm
from costmodel.compose.matmul import MatmulTable
from costmodel.compose.serving_tables import Precision, ServingTables
from costmodel.planning.acceptance import Acceptance
from costmodel.planning.batching import Overheads
from costmodel.planning.engines import EngineRules, ValueBytes
from costmodel.planning.forwards import DeviceLimits, ForwardSeconds, Origin
from costmodel.planning.request import ServingPolicy
from costmodel.planning.servers import OperatingPoint, Server
from costmodel.planning.simulation.steps import StepTime, exact_steps

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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LineSteps:
    """A step takes `fixed_s` + `row_s` a row + `token_s` a cached token; a prompt `row_s` a row."""

    architecture: ModelArchitecture
    fixed_s: float = 10e-3
    row_s: float = 20e-6
    token_s: float = 1e-8
    value_bytes: ValueBytes = dataclasses.field(default_factory=ValueBytes)
    device: DeviceLimits = dataclasses.field(
        default_factory=lambda: DeviceLimits(name="made up", memory_bytes=80e9, power_w=500.0)
    )
    origin: Origin = dataclasses.field(
        default_factory=lambda: Origin(kind="measured", text="", error=0.05, whole_runtime=True)
    )
    tensor_parallel: int = 1

    def decode(self, batch: float, context: float, rows: int = 1) -> ForwardSeconds:
        return ForwardSeconds(
            products=self.fixed_s + self.row_s * batch * rows,
            attention=self.token_s * batch * context,
        )

    def prompt(self, tokens: float, rows: float, chunks: int) -> ForwardSeconds:
        return ForwardSeconds(products=self.row_s * tokens)


@pytest.fixture
def line_steps() -> type[LineSteps]:
    """The class, to be made with other numbers."""
    return LineSteps


def plain_steps(forward, rules: EngineRules, overheads: Overheads) -> StepTime:
    """The steps of a server that drafts nothing."""
    server = Server(forward=forward, rules=rules, overheads=overheads, policy=ServingPolicy())
    point = OperatingPoint(
        running=1,
        shape="plain",
        nodes=0,
        committed=1.0,
        cycle_s=0.0,
        tpot_s=0.0,
        prefill_s=0.0,
        ttft_s=0.0,
        requests_per_s=0.0,
    )
    return exact_steps(server, [point])


@pytest.fixture
def line_acceptance() -> Acceptance:
    """Chains of 0.8 a token; trees that gain half of 6 tokens by 8 nodes."""
    nodes = np.arange(512)
    chain = np.concatenate([[1.0], 1 + np.cumsum(0.8 ** np.arange(1, 16))])
    return Acceptance(
        label="made up", kind="given", chain=chain, tree=1 + 6 * nodes / (nodes + 8), spread=0.1
    )
