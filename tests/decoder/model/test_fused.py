"""Fused layers: equal outputs to the model's own layers, and an unchanged state dict."""

from dataclasses import replace

import pytest
import torch

from decoder.model.loading import borrow_model
from decoder.model.making import make_target
from decoder.model.runtime.fused import fuse, unfuse
from decoder.model.target import Step
from decoder.profiling.measured_profile import subject_of
from tests.decoder import models
from tests.decoder.models import PROMPT, plain_logits, random_model, random_tree

UNFUSED = ("gpt-neox", "qwen3-moe")
FUSIBLE = [family for family in models.FAMILIES if family not in UNFUSED]
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

    layer.mlp.up_proj.__class__ = type("Adapted", (torch.nn.Linear,), {})
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
    assert subject_of(target).note == "random weights"
    target.architecture = replace(target.architecture, experts=8, active_experts=2, expert_ffn=16)
    assert "random routing" in subject_of(target).note
