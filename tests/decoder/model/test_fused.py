"""Fused layers: equal outputs to the model's own layers, and an unchanged state dict."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from decoder.model.attention import ForwardPlan, plan_segment
from decoder.model.kv_cache import KVCache
from decoder.model.loading import borrow_model
from decoder.model.making import make_target
from decoder.model.runtime import few_rows
from decoder.model.runtime.base import NO_TOKEN
from decoder.model.runtime.eager import greedy_token, greedy_tokens
from decoder.model.runtime.few_rows import LANES, MOST_NUMBERS, NO_NORM, FewNorm, FewRows, are_few
from decoder.model.runtime.fused import fuse, unfuse
from decoder.model.structure import Structure
from decoder.model.target import Step
from decoder.profiling.measured_profile import weights_note
from decoder.tree.draft_tree import visibility
from tests.decoder import models
from tests.decoder.models import FAMILIES, PROMPT, plain_logits, random_model, random_tree

UNFUSED = ("gpt-neox", "qwen3-moe")
FUSIBLE = [family for family in FAMILIES if family not in UNFUSED]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def with_biases(model):
    """The same model with biases in every product, as some Llama-like models have them."""
    for layer in model.model.layers:
        for linear in (*layer.self_attn.children(), *layer.mlp.children()):
            if type(linear) is torch.nn.Linear and linear.bias is None:
                noise = torch.randn(linear.out_features, generator=torch.Generator().manual_seed(1))
                linear.bias = torch.nn.Parameter(noise.to(linear.weight.dtype))
    return model


def verified(model, *, fused):
    """Logits of a prompt and of a tree behind it, and features, with or without fused layers."""
    target = make_target(borrow_model(model), fused=fused, runtime="eager")
    target.capture((1,))
    target.reserve(60)
    prompt = target.prefill(torch.tensor(PROMPT))
    tree = target.verify([Step(5, random_tree(14, 0))])[0]
    return prompt, tree, target.features()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("family", FUSIBLE)
def test_fused_layers_give_what_the_layers_give(family, biased, dtype):
    outputs = []
    for fused in (True, False):
        model = random_model(family, dtype=dtype)
        if biased:
            with_biases(model)
        outputs.append(verified(model, fused=fused))
        assert [("forward" in layer.__dict__) for layer in model.model.layers] == [fused] * 2
    for ours, theirs in zip(*outputs, strict=True):
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("family", FUSIBLE)
def test_the_state_dict_stays_what_it_was(family):
    model = random_model(family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    logits = plain_logits(model, PROMPT)
    assert fuse(model) == 2
    assert model.state_dict().keys() == before.keys()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    torch.testing.assert_close(plain_logits(model, PROMPT), logits)
    unfuse(model)
    assert not any("forward" in module.__dict__ for module in model.modules())
    torch.testing.assert_close(plain_logits(model, PROMPT), logits)


def test_a_borrowed_model_is_never_touched():
    model = random_model("qwen3")
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    target = make_target(borrow_model(model), owned=False)
    target.reserve(60)
    target.prefill(torch.tensor(PROMPT))
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_layers_that_cannot_be_fused_are_left():
    for family in UNFUSED:
        assert fuse(random_model(family)) == 0
    model = random_model("llama-gqa")
    layer = model.model.layers[0]

    class Adapted(torch.nn.Linear):
        """A product changed by an adapter."""

    layer.mlp.up_proj.__class__ = Adapted
    assert fuse(model) == 1
    assert "forward" not in layer.__dict__


@pytest.mark.gpu
@pytest.mark.parametrize("family", FUSIBLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_layers_on_the_device(family, dtype):
    """Kernels round intermediate results otherwise, which shows in bfloat16."""
    outputs = []
    for fused in (True, False):
        model = random_model(family, dtype=dtype).cuda()
        target = make_target(borrow_model(model), fused=fused, runtime="eager")
        target.reserve(60)
        target.prefill(torch.tensor(PROMPT).cuda())
        outputs.append(target.verify([Step(5, random_tree(14, 0))])[0].float())
    worst = (outputs[0] - outputs[1]).abs().max() / outputs[1].abs().max()
    assert worst < (1e-4 if dtype == torch.float32 else 5e-2)


def test_random_routing_is_said_in_the_profile():
    target = models.target_of(random_model("llama-gqa"))
    assert weights_note(target) == "random weights"
    target.architecture = replace(target.architecture, experts=8, active_experts=2, expert_ffn=16)
    assert "random routing" in weights_note(target)


pytestmark = pytest.mark.cpu_kind

HEADS, KV_HEADS, WIDTH, EPS = 6, 2, 16, 1e-5
LAYERS, LAYER, PREFIX = 3, 1, 11


DTYPES = [torch.bfloat16, torch.float32]


def random(*shape, dtype=torch.bfloat16):
    return torch.randn(shape).to(dtype)


def assert_same(ours, theirs):
    """Equal bit for bit in bfloat16, but for rounding in float32."""
    bound = 0.0 if ours.dtype == torch.bfloat16 else 3e-6
    torch.testing.assert_close(ours, theirs, atol=bound, rtol=bound)


def forward_of(rows, dtype=torch.bfloat16):
    """A cache with a prefix, and the plan of so many rows of a tree behind it."""
    shape = Structure(layers=LAYERS, heads=HEADS, kv_heads=KV_HEADS, head_dim=WIDTH, window=None)
    cache = KVCache(shape, capacity=64, sequences=2, dtype=dtype, device=torch.device("cpu"))
    cache.data.normal_()
    cache.lengths = [PREFIX, PREFIX + 3]
    parents = (np.arange(1, rows) - 1) // 2
    visible = torch.from_numpy(visibility(parents)) if rows > 1 else None
    parts = [
        plan_segment(cache, s, slice(s * rows, (s + 1) * rows), visible, HEADS // KV_HEADS)
        for s in range(2)
    ]
    return cache, ForwardPlan(tuple(parts))


def torch_norm(rows, weight):
    """RMSNorm as transformers rounds it."""
    return weight * functional.rms_norm(rows, rows.shape[-1:], None, EPS)


@pytest.mark.parametrize("width", [1, 7, 64, 128, 576, 1000, 4096, 11008])
def test_rows_are_summed_in_the_order_of_torch(width):
    assert few_rows.sum_lanes(width) in LANES


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 7), (1, 576), (5, 4096)])
def test_a_norm_is_that_of_torch(rows, width, dtype):
    torch.manual_seed(width)
    x, weight = random(rows, width, dtype=dtype) * 3, random(width, dtype=dtype)
    few = FewRows(x, random(rows, WIDTH), random(rows, WIDTH), forward_of(1, dtype)[1])
    assert_same(few.norm(x, FewNorm.of(weight, EPS)), torch_norm(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_norms", [False, True])
@pytest.mark.parametrize("rows", [1, 5])
def test_rotated_attention_and_the_cache_are_those_of_torch(rows, head_norms, dtype):
    torch.manual_seed(rows)
    cache, plan = forward_of(rows, dtype)
    qkv = random(2 * rows, HEADS + 2 * KV_HEADS, WIDTH, dtype=dtype)
    cosine, sine = (random(2 * rows, WIDTH, dtype=dtype) for _ in range(2))
    weights = random(HEADS + KV_HEADS, WIDTH, dtype=dtype)
    few = FewRows(random(2 * rows, 8, dtype=dtype), cosine, sine, plan)
    ours = few.attend(LAYER, qkv, FewNorm.of(weights, EPS) if head_norms else NO_NORM, 0.25)
    written = cache.data.clone()

    turned, value = qkv.split((HEADS + KV_HEADS, KV_HEADS), 1)
    if head_norms:
        turned = torch_norm(turned, weights)
    swapped = torch.cat(turned.chunk(2, -1)[::-1], -1)
    turned = turned * cosine[:, None] + swapped * sine[:, None]
    query, key = (part.transpose(0, 1)[None] for part in turned.split((HEADS, KV_HEADS), 1))
    theirs = plan.attend(LAYER, query, key, value.transpose(0, 1)[None], 0.25)
    assert_same(ours, theirs.reshape(2 * rows, -1))
    assert_same(written, cache.data)


def test_few_rows_are_in_bfloat16_and_float32():
    for dtype in DTYPES:
        assert are_few(torch.zeros(8, 16, dtype=dtype))
        assert not are_few(torch.zeros(MOST_NUMBERS // 16 + 1, 16, dtype=dtype))
    assert not are_few(torch.zeros(8, 16, dtype=torch.float64))


@pytest.mark.parametrize("vocab", [1, 3, 512, 513, 5000])
def test_greedy_tokens_are_those_of_torch(vocab):
    torch.manual_seed(vocab)
    rounded, zeros = random(vocab).round(), -0.0 * random(vocab)
    for logits in (random(vocab), -random(vocab).abs(), rounded, zeros):
        assert greedy_token(logits) == int(greedy_tokens(logits.float()))


@pytest.mark.parametrize("value", ["nan", "-nan", "inf"])
def test_logits_that_are_no_numbers_have_no_greedy_token(value):
    logits = random(700)
    logits[600] = -torch.tensor(float("nan")) if value == "-nan" else float(value)
    assert greedy_token(logits) == NO_TOKEN
    assert greedy_token(torch.full((700,), float("-inf")).bfloat16()) == NO_TOKEN
