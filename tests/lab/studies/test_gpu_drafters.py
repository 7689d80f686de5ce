"""The suite's drafters on a pretended GPU: what they capture asks the host for nothing."""

from types import SimpleNamespace

import pytest
import torch

from costmodel.architecture import ModelArchitecture
from decoder.drafters.blocks import Rotary
from decoder.drafters.caches import TableRows
from decoder.drafters.dflash.drafter import BlockForwards
from decoder.drafters.eagle3.drafter import LevelForwards
from decoder.model.loading import LoadedModel
from decoder.model.runtime.capture import BudgetedCapture
from decoder.model.runtime.eager import EagerRuntime
from decoder.model.runtime.fused import triton_installed
from decoder.model.structure import Structure
from decoder.model.target import Target
from lab.studies import gpu_timing
from tests.decoder.model.pretended_device import pretended_device
from tests.decoder.model.test_captured_step import DEVICE, EmptyTables, made, on_device


@pytest.mark.skipif(
    not triton_installed(), reason="triton is not installed (the dev extra brings it)"
)
@pytest.mark.parametrize("kind", ["dflash", "eagle3"])
def test_what_a_drafter_captures_asks_the_host_for_nothing(kind, monkeypatch):
    """Of published shapes, beside Qwen3-8B: each function that its forwards are made of."""
    monkeypatch.setattr(torch.nn.Module, "to", on_device)
    monkeypatch.setattr(  # which asks for the mapped vocabulary
        gpu_timing, "Eagle3Drafter",
        lambda target, model: SimpleNamespace(
            model=model, rotary=Rotary(model.config.shape, target.device), target=target,
            embed=target.embed,
        ),
    )  # fmt: skip
    with pretended_device() as launched:
        step = made("Qwen3-8B", 5)
        sizes = ModelArchitecture.from_hf_config(step.model.config, name="", approximate=True)
        loaded = LoadedModel(
            model=step.model, name="", source="", weights="random", architecture=sizes
        )
        structure = Structure(layers=5, heads=32, kv_heads=8, head_dim=128)
        target = Target(loaded, step, structure, *[EagerRuntime(step, structure)] * 2)
        drafter = getattr(gpu_timing, f"{kind}_drafter")(target)
        tables, capture = EmptyTables(16), BudgetedCapture(None, 1)

        def empty(*sizes, dtype=torch.bfloat16):
            return torch.empty(*sizes, dtype=dtype, device=DEVICE)

        if kind == "dflash":
            captured, layers = BlockForwards(drafter, capture), 5
            cache = empty(layers, 2, 1, 8, 2048, 128)
            features = len(drafter.feature_layers) * 4096
            rows = TableRows(tables, cache, 4)
            assert captured._stored(rows, empty(16, features)) == ()
            made_of = captured._outputs(rows)
        else:
            captured, layers = LevelForwards(drafter, capture), 2
            cache = empty(1, 2, 1, 8, 2048, 128)
            rows = TableRows(tables, cache, 4)
            captured._extend(rows, empty(16, 4096))
            made_of = captured._level(rows, empty(16, dtype=torch.int64))
        assert all(one.device.type == "cuda" for one in made_of)
    assert sum(one.kernel.__name__ == "_attend_part" for one in launched) == layers
