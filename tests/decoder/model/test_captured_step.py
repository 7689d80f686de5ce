"""The captured step on tensors without numbers, of real size: its launches, nothing of the host.

They lie on PyTorch's `meta` device, since a CPU build has no other that holds none; what asks
for a number fails there.
"""

from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from decoder.model.runtime.eager import ModelStep, greedy_tokens
from decoder.model.runtime.fused import TablePlan, fuse, triton_installed

pytestmark = pytest.mark.skipif(
    not triton_installed(), reason="triton is not installed (the dev extra brings it)"
)

DEVICE = "meta"
ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "detach", "alias"}
SIZES = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
}  # fmt: skip
FAMILIES = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}


class Launches(TorchDispatchMode):
    """Names each operation that starts a kernel, and copies from the CPU."""

    def __init__(self):
        super().__init__()
        self.names, self.from_cpu = [], []

    def __torch_dispatch__(self, operation, types, arguments=(), named=None):
        result = operation(*arguments, **(named or {}))
        name = operation.overloadpacket.__name__
        sources = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        there = any(tensor.device.type == DEVICE for tensor in made)
        if there and any(tensor.device.type == "cpu" and tensor.ndim for tensor in sources):
            self.from_cpu.append(name)
        if there and not operation.is_view and name not in ALLOCATES:
            # `addmm` of a matrix copies it to the result first.
            self.names += ["copy_", name] if name == "addmm" and sources[0].ndim > 1 else [name]
        return result


class EmptyTables:
    """The tensors of row tables for some rows of one sequence, on the device."""

    def __init__(self, rows):
        self.tokens, self.positions, self.slots, self.owners = torch.zeros(
            4, rows, dtype=torch.int64, device=DEVICE
        )
        self.starts, self.counts, self.prefixes, self.tails = torch.zeros(
            4, 1, dtype=torch.int32, device=DEVICE
        )
        self.bits = torch.zeros(rows, 2, dtype=torch.int32, device=DEVICE)


@contextmanager
def recording(monkeypatch):
    """Our kernels recorded instead of run, as on a GPU."""
    from tests.decoder.model.compiled_kernels import recorded

    monkeypatch.setattr("decoder.model.runtime.fused.kernels_usable", lambda device: True)
    with torch.no_grad(), recorded() as launched:
        yield launched


def emptied(model):
    """The model in bfloat16 on the device."""
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                empty = torch.empty(weight.shape, dtype=torch.bfloat16, device=DEVICE)
                module._parameters[name] = torch.nn.Parameter(empty, requires_grad=False)
        for name, buffer in module._buffers.items():
            module._buffers[name] = torch.empty_like(buffer, device=DEVICE)
    return model


def launches_of_a_step(monkeypatch, family, rows, layers):
    """The names of all launches of a captured step, ours and PyTorch's."""
    configuration, kind = FAMILIES[family]
    with recording(monkeypatch) as launched:
        with torch.device(DEVICE):
            model = emptied(kind(configuration(**SIZES, num_hidden_layers=layers)))
        assert fuse(model) == layers
        step = ModelStep(model, owned=True)
        cache = torch.empty(layers, 2, 1, 8, 2048, 128, dtype=torch.bfloat16, device=DEVICE)
        tables = EmptyTables(rows)
        logits = torch.empty(rows, step.vocab, dtype=torch.bfloat16, device=DEVICE)
        chosen = torch.empty(rows, dtype=torch.int64, device=DEVICE)
        with Launches() as torch_launches:
            hidden, _ = step.run(tables.tokens, tables.positions, TablePlan(cache, tables))
            step.logits_into(hidden, logits)
            chosen.copy_(greedy_tokens(logits))
    assert torch_launches.from_cpu == []
    return [one.kernel.__name__ for one in launched], torch_launches.names


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [1, 64])
def test_a_layer_is_ten_launches(monkeypatch, family, rows):
    """Four products and six kernels; PyTorch starts nothing else within a layer."""
    (few, few_torch), (many, many_torch) = (
        launches_of_a_step(monkeypatch, family, rows, layers) for layers in (1, 3)
    )
    assert len(many) - len(few) == 2 * 6
    assert few[:6] == [
        "_rms_norm", "_rotate_and_store", "_attend_part", "_merge_parts", "_rms_norm", "_swiglu",
    ]  # fmt: skip
    layers = Counter(many_torch) - Counter(few_torch)
    assert layers == {"mm": 2 * 3, "addmm_": 2}


def test_grouped_experts_ask_the_host_for_nothing(monkeypatch):
    """As transformers computes them by default; `eager` ones loop over the experts in use."""
    sizes = SIZES | {"hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 1}
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1}
    tables, outcomes = EmptyTables(16), {}
    for way in ("grouped_mm", "eager"):
        with torch.device(DEVICE):
            model = emptied(Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts)))
        model.set_experts_implementation(way)
        cache = torch.empty(1, 2, 1, 8, 2048, 128, dtype=torch.bfloat16, device=DEVICE)
        with recording(monkeypatch), Launches() as seen:
            try:
                step = ModelStep(model, owned=True)
                step.run(tables.tokens, tables.positions, TablePlan(cache, tables))
                outcomes[way] = list(seen.from_cpu)
            except (RuntimeError, NotImplementedError):
                outcomes[way] = ["asked"]
    assert outcomes == {"grouped_mm": [], "eager": ["asked"]}
