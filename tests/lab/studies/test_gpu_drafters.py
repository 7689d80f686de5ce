"""The suite's drafters on a pretended GPU: what they capture asks the host for nothing."""

from types import SimpleNamespace

import pytest
import torch

from costmodel.architecture import ModelArchitecture
from decoder.drafters.blocks import Rotary
from decoder.drafters.caches import TableRows
from decoder.drafters.dflash.drafter import BlockForwards
from decoder.drafters.eagle3 import LevelForwards
from decoder.model.loading import LoadedModel
from decoder.model.runtime.eager import EagerRuntime
from decoder.model.structure import Structure
from decoder.model.target import Target
from lab.studies import gpu_timing
from tests.decoder.model.pretended_device import pretended_device
from tests.decoder.model.test_captured_step import DEVICE, EmptyTables, made, on_device

pytest.importorskip("triton", reason="triton is not installed (the dev extra brings it)")

FORWARDS = {"dflash": (BlockForwards, 5, 5), "eagle3": (LevelForwards, 1, 2)}  # layers: cached, all


@pytest.mark.parametrize("kind", FORWARDS)
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
        named = {"name": "", "source": "", "weights": "random"}
        loaded = LoadedModel(model=step.model, architecture=sizes, **named)
        structure = Structure(layers=5, heads=32, kv_heads=8, head_dim=128)
        target = Target(loaded, step, structure, EagerRuntime(step, structure))
        drafter = getattr(gpu_timing, f"{kind}_drafter")(target)

        def empty(*sizes, dtype=torch.bfloat16):
            return torch.empty(*sizes, dtype=dtype, device=DEVICE)

        forwards, cached, layers = FORWARDS[kind]
        captured = forwards(drafter, SimpleNamespace())
        rows = TableRows(EmptyTables(16), empty(cached, 2, 1, 8, 2048, 128), 4)
        if kind == "dflash":
            assert captured._stored(rows, empty(16, len(drafter.feature_layers) * 4096)) == ()
            made_of = captured._outputs(rows)
        else:
            captured._extend(rows, empty(16, 4096))
            made_of = captured._level(rows, empty(16, dtype=torch.int64))
        assert all(one.device.type == "cuda" for one in made_of)
    assert sum(one.kernel.__name__ == "_attend_part" for one in launched) == layers
