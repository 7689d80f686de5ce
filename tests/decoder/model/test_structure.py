"""What is seen in a model's forward, and the check of its trees at load."""

import json
from concurrent.futures import ThreadPoolExecutor
from time import sleep

import numpy as np
import pytest
import torch
import transformers
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from costmodel.errors import InputError
from decoder.model import selfcheck
from decoder.model.attention import Scoring
from decoder.model.loading import borrow_model
from decoder.model.making import make_target
from decoder.model.structure import Structure
from lab.tiny_models import tiny_model
from tests.decoder.models import SIZES, random_model, target_of
from tests.tiny_folder import isolate

MORE = SIZES | {"num_key_value_heads": 2, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A data directory of one's own, with nothing known from earlier tests."""
    monkeypatch.setattr(selfcheck, "_checked", {})
    isolate(monkeypatch, tmp_path / "home")
    return tmp_path / "home"


def kept(home):
    return sorted(home.rglob("structures/*.json"))


def test_sizes_are_those_that_attention_sees():
    found = target_of(random_model("qwen3")).structure
    assert found == Structure(layers=2, heads=4, kv_heads=2, head_dim=16)
    assert found.group == 2
    assert target_of(random_model("llama-mha")).structure.kv_heads == 4


def test_a_scale_behind_the_head_leaves_no_rows_of_it():
    sizes = MORE | {"logits_scaling": 8.0, "residual_multiplier": 0.3}
    model = transformers.GraniteForCausalLM(transformers.GraniteConfig(**sizes)).double().eval()
    target = make_target(borrow_model(model), owned=False)
    assert not target.structure.plain_head
    assert target.head_rows(np.array([1, 2])) is None


def test_smallest_window_of_all_layers():
    layers = ["full_attention", "sliding_attention"]
    config = Gemma3TextConfig(**MORE, head_dim=8, sliding_window=24, layer_types=layers)
    target = target_of(Gemma3ForCausalLM(config).eval())
    assert target.structure.window == 24
    assert target.model.config.sliding_window == 24  # smaller for the check only


def test_threads_that_try_one_model_leave_its_windows(monkeypatch):
    """Each check makes the windows in the model's config smaller for its time."""
    model = random_model("mistral", sliding_window=24)
    monkeypatch.setattr(selfcheck, "_key", lambda step: str(id(step)))  # no check knows another's
    compared, inside = selfcheck._compared, []

    def slow(*arguments):
        inside.append(model.config.sliding_window)
        sleep(0.05)
        inside.append(model.config.sliding_window)
        return compared(*arguments)

    monkeypatch.setattr(selfcheck, "_compared", slow)
    with ThreadPoolExecutor(4) as pool:
        loaded = [borrow_model(model) for _ in range(4)]
        targets = list(pool.map(lambda one: make_target(one, owned=False), loaded))
    assert [target.structure.window for target in targets] == [24] * 4
    assert inside == [selfcheck.WINDOW] * 8
    assert model.config.sliding_window == 24


@pytest.mark.parametrize("kind", ["gpt_oss", "gemma2"])
def test_sinks_and_soft_caps_that_are_missed_are_noticed(kind, monkeypatch):
    model = tiny_model(kind)
    for name, weights in model.named_parameters():
        if name.endswith(("sinks", "q_proj.weight")):
            torch.nn.init.normal_(weights)
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = 0.5  # of Gemma 2
    monkeypatch.setattr("decoder.model.attention.Scoring", lambda scale, *_: Scoring(scale))
    with pytest.raises(InputError, match="logits of a tree differ"):
        make_target(borrow_model(model), owned=False)


def test_options_of_attention_that_are_not_there(home, monkeypatch):
    model = random_model("llama-gqa")
    attention = model.model.layers[0].self_attn
    forward = attention.forward
    attention.forward = lambda *a, **k: forward(*a, **k, position_bias=1.0)
    with pytest.raises(InputError, match="its attention has a bias by position on its scores"):
        make_target(borrow_model(model), owned=False)
    assert kept(home) == []


@pytest.mark.parametrize(("hook", "message"), [
    (lambda module, args, out: out.cumsum(1), r"differ from transformers' own by \d"),
    (lambda module, args, out: out[:, :, :5], "its forward does not run with another"),
], ids=["rows meet", "shapes differ"])  # fmt: skip
def test_what_happens_outside_of_attention_is_noticed(hook, message):
    """As a convolution or a recurrent state would let rows meet."""
    model = random_model("llama-gqa")
    model.model.layers[1].mlp.register_forward_hook(hook)
    with pytest.raises(InputError, match=message) as caught:
        target_of(model)
    assert "\n" not in str(caught.value)


def test_what_passed_is_not_tried_again(home, monkeypatch):
    first = target_of(random_model("llama-gqa")).structure
    [path] = kept(home)
    assert json.loads(path.read_text())["structure"]["kv_heads"] == 2
    monkeypatch.setattr(selfcheck, "_checked", {})
    monkeypatch.setattr(selfcheck, "_try", lambda step: pytest.fail("tried again"))
    assert target_of(random_model("llama-gqa", seed=3)).structure == first
    with pytest.raises(pytest.fail.Exception):  # another config
        target_of(random_model("llama-gqa", rms_norm_eps=1e-4))


def test_weights_that_give_no_numbers_are_left_to_decoding(home):
    model = random_model("llama-gqa")
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    assert target_of(model).structure.layers == 2
    assert kept(home) == []
