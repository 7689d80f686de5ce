"""Forwards on a pretended GPU, at real size: their launches, and no question to the host."""

from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from decoder.acceptance.drawn import DrawnTree
from decoder.acceptance.nodes import judge_rows
from decoder.acceptance.sampling import Sampling, SeededChoices, one_of_each, row_distributions
from decoder.model.attention import RowBlock
from decoder.model.kv_cache import KVCache
from decoder.model.runtime.eager import EagerRuntime, ModelStep, greedy_tokens
from decoder.model.runtime.fused import TableAttention, fuse, triton_version
from decoder.model.structure import read_structure
from decoder.tree.draft_tree import EMPTY, visibility
from tests.decoder.model.pretended_device import pretended_device
from tests.decoder.models import random_tree

pytestmark = pytest.mark.skipif(
    not triton_version(), reason="triton is not installed (the dev extra brings it)"
)

DEVICE = "cuda:0"
ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "detach", "alias"}
SIZES = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
}  # fmt: skip
MIXTURE = {
    "hidden_size": 2048, "num_key_value_heads": 4, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1,
}  # fmt: skip
SMALL = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16}
MODELS = {  # the kind, and sizes unlike `SIZES`
    "Qwen3-8B": (Qwen3Config, Qwen3ForCausalLM, {}),
    "Llama-3.1-8B": (LlamaConfig, LlamaForCausalLM, {"vocab_size": 128256}),
    "Qwen3-0.6B": (Qwen3Config, Qwen3ForCausalLM, SMALL),  # a causal drafter
    "Qwen3-30B-A3B": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM, MIXTURE),
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
        there = any(tensor.device.type == "cuda" for tensor in made)
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


def on_device(model, *_):
    """The model with parameters in bfloat16 on the pretended device, without their numbers."""
    for module in model.modules():
        for key, weight in module._parameters.items():
            if weight is not None:
                empty = torch.empty(weight.shape, dtype=torch.bfloat16, device=DEVICE)
                module._parameters[key] = torch.nn.Parameter(empty, requires_grad=False)
        for key, buffer in module._buffers.items():
            module._buffers[key] = torch.empty_like(buffer, device=DEVICE)
    return model


def made(name, layers):
    """A fused model in bfloat16 on the pretended device."""
    configuration, kind, sizes = MODELS[name]
    with torch.device("meta"):
        model = on_device(kind(configuration(**SIZES | sizes, num_hidden_layers=layers)))
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
        hidden, features = step.run(tables.tokens, tables.positions, TableAttention(cache, tables))
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
    with pretended_device() as launched:
        step = made(name, 2)  # of layers that are alike
        step.captured = (0, 1, 2)
        _, features = run(step, rows)
        assert features.shape == (rows, 3 * step.model.config.hidden_size)
    assert sum(one.kernel.__name__ == "_attend_part" for one in launched) == 2


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}, {"top_k": 20, "top_p": 0.95}])
def test_sampled_tokens_of_a_tree_ask_the_host_for_nothing(cut):
    with pretended_device():
        logits = torch.empty(256, 151936, dtype=torch.bfloat16, device=DEVICE)
        sampling, tree = Sampling(temperature=0.7, **cut), random_tree(256, 0)
        choices = SeededChoices(sampling, torch.device("cpu"))
        choices.generator = None  # of the pretended device
        assert choices.of_tree(tree.row_depths(), logits).is_cuda
        q, sources = torch.empty(16, 151936, device=DEVICE), np.minimum(tree.row_depths(), 15)
        drawn = DrawnTree(tree.tokens, tree.parents, tree.depths, tree.scores, q, sources)
        judged = judge_rows(
            drawn, lambda rows: row_distributions(logits.index_select(0, rows), sampling),
            partial(one_of_each, uniform=q[0, :1].double()), device=logits.device, whole_paths=True,
        )  # fmt: skip
        assert judged.shape == (5, 256) and judged.is_cuda


HYBRIDS = {
    "Qwen3-Next": (transformers.Qwen3NextConfig, transformers.Qwen3NextForCausalLM, 4),
    "Falcon-H1": (transformers.FalconH1Config, transformers.FalconH1ForCausalLM, 2),
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrids_forward_stays_on_the_device(name, monkeypatch):
    """Layers with states run eagerly; one group of them, with the sizes of its config."""
    monkeypatch.setattr("decoder.model.structure._seen", lambda mask, positions: positions)
    configuration, kind, layers = HYBRIDS[name]
    with pretended_device():
        with torch.device("meta"):
            model = on_device(kind(configuration(num_hidden_layers=layers)))
        step = ModelStep(model, owned=True)
        structure = read_structure(model)
        assert "recurrent state" in structure.uneven
        where = {"dtype": torch.bfloat16, "device": torch.device(DEVICE)}
        cache = KVCache(structure, capacity=2048, sequences=1, **where)
        runtime = EagerRuntime(step, structure)
        for rows in (1, 64):
            tree = random_tree(rows, 0) if rows > 1 else EMPTY
            visible = visibility(tree.parents) if rows > 1 else None
            block = RowBlock(0, tree.row_tokens(5), tree.row_depths(), visible)
            logits = runtime.forward(cache, [block]).logits
            assert logits.shape == (rows, model.config.vocab_size) and logits.is_cuda


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
