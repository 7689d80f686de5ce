"""The captured step on a pretended GPU, at real size: its launches, and no question to the host."""

from collections import Counter

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from decoder.model.runtime.eager import ModelStep, greedy_tokens
from decoder.model.runtime.fused import TablePlan, fuse
from decoder.model.runtime.trial import triton_installed
from tests.decoder.model.pretended_device import pretended_device

pytestmark = pytest.mark.skipif(
    not triton_installed(), reason="triton is not installed (the dev extra brings it)"
)

DEVICE = "cuda"
ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "detach", "alias"}
SIZES = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
}  # fmt: skip
MIXTURE = {
    "hidden_size": 2048, "num_key_value_heads": 4, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1,
}  # fmt: skip
MODELS = {  # layers, the kind, and sizes unlike `SIZES`
    "Qwen3-8B": (36, Qwen3Config, Qwen3ForCausalLM, {}),
    "Llama-3.1-8B": (32, LlamaConfig, LlamaForCausalLM, {"vocab_size": 128256}),
    "Qwen3-30B-A3B": (48, transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM, MIXTURE),
}


class Launches(TorchDispatchMode):
    """Names each operation that starts a kernel."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, arguments=(), named=None):
        result = operation(*arguments, **(named or {}))
        name = operation.overloadpacket.__name__
        sources = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        there = any(tensor.device.type == DEVICE for tensor in made)
        if there and not operation.is_view and name not in ALLOCATES:
            # `addmm` of a matrix copies it to the result first.
            self.names += ["copy_", name] if name == "addmm" and sources[0].ndim > 1 else [name]
        return result


class EmptyTables:
    """The tensors of row tables for some rows of one sequence, on the device."""

    def __init__(self, rows):
        wide = torch.zeros(4, rows, dtype=torch.int64, device=DEVICE)
        few = torch.zeros(4, 1, dtype=torch.int32, device=DEVICE)
        self.tokens, self.positions, self.slots, self.owners = wide.unbind()
        self.starts, self.counts, self.prefixes, self.tails = few.unbind()
        self.bits = torch.zeros(rows, 2, dtype=torch.int32, device=DEVICE)
        self.rows = rows


def made(name, layers):
    """A fused model in bfloat16 on the pretended device."""
    _, configuration, kind, sizes = MODELS[name]
    with torch.device("meta"):
        model = kind(configuration(**SIZES | sizes, num_hidden_layers=layers))
    for module in model.modules():
        for key, weight in module._parameters.items():
            if weight is not None:
                empty = torch.empty(weight.shape, dtype=torch.bfloat16, device=DEVICE)
                module._parameters[key] = torch.nn.Parameter(empty, requires_grad=False)
        for key, buffer in module._buffers.items():
            module._buffers[key] = torch.empty_like(buffer, device=DEVICE)
    if hasattr(model.config, "num_experts"):
        model.set_experts_implementation("grouped_mm")
    fuse(model)
    return ModelStep(model, owned=True)


def run(step, rows):
    """What a capture records: a forward, its logits, the features and the greedy tokens."""
    config = step.model.config
    shape = (config.num_hidden_layers, 2, 1, config.num_key_value_heads, 2048, 128)
    cache = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
    tables = EmptyTables(rows)
    logits = torch.empty(rows, step.vocab, dtype=torch.bfloat16, device=DEVICE)
    chosen = torch.empty(rows, dtype=torch.int64, device=DEVICE)
    with Launches() as seen:
        hidden, features = step.run(tables.tokens, tables.positions, TablePlan(cache, tables))
        step.logits_into(hidden, logits)
        chosen.copy_(greedy_tokens(logits))
    return seen.names, features


@pytest.mark.parametrize("name", ["Qwen3-8B", "Llama-3.1-8B"])
@pytest.mark.parametrize("rows", [1, 64])
def test_a_layer_is_ten_launches(name, rows):
    """Four products and six kernels; PyTorch starts nothing else within a layer."""
    ours, torchs = [], []
    for layers in (1, 3):
        with pretended_device() as launched:
            torchs.append(Counter(run(made(name, layers), rows)[0]))
        ours.append([one.kernel.__name__ for one in launched])
    assert len(ours[1]) - len(ours[0]) == 2 * 6
    assert ours[0][:6] == [
        "_rms_norm", "_rotate_and_store", "_attend_part", "_merge_parts", "_rms_norm", "_swiglu",
    ]  # fmt: skip
    assert torchs[1] - torchs[0] == {"mm": 2 * 3, "addmm_": 2}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rows", [1, 256])
def test_a_whole_captured_step_asks_the_host_for_nothing(name, rows):
    layers = MODELS[name][0]
    with pretended_device() as launched:
        step = made(name, layers)
        step.captured = (0, layers // 2, layers)
        _, features = run(step, rows)
        assert features.shape == (rows, 3 * step.model.config.hidden_size)
    assert sum(one.kernel.__name__ == "_attend_part" for one in launched) == layers


@pytest.mark.parametrize(
    ("fault", "said"), [("question", "_local_scalar_dense"), ("mixed devices", "same device")]
)
def test_the_pretended_device_finds_a_fault(fault, said, monkeypatch):
    with pretended_device():
        step = made("Qwen3-30B-A3B", 1)
        layer, forward = step.model.model.layers[0], step.model.model.layers[0].forward

        def faulty(hidden, **named):
            hidden = forward(hidden, **named)
            if fault == "question" and bool(hidden.sum() > 0):
                return hidden
            return hidden + torch.ones(2048)

        monkeypatch.setattr(layer, "forward", faulty)
        with pytest.raises(RuntimeError, match=said):
            run(step, 16)
