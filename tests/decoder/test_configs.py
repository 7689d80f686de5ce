"""Configs as people publish them: keys left out, renamed, nested or null, of every kind."""

import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from costmodel.catalog import load_targets, resolve_target
from costmodel.errors import InputError
from costmodel.hf_kinds import kinds
from decoder.configs import config_of, read_model
from decoder.model.loading import load_model
from tests.costmodel.test_architecture import HYBRIDS, LLAMA

SIZES = {key: value for key, value in LLAMA.items() if key != "model_type"}
SIZES |= {"sliding_window": 64, "num_hidden_layers": 3, "head_dim": 16, "attention_bias": False}
OLD_NAMES = {"gpt_neox": {"rotary_pct": 0.25}, "kimi_linear": {"num_shared_experts": 1}}


@pytest.mark.parametrize(("fields", "expected"), [
    (  # Mistral's class has 8 KV heads and a window
        {"model_type": "mistral", "num_hidden_layers": 32, "vocab_size": 32000},
        {"kv_heads": 8, "sliding_window": 4096, "parameters": 7_241_732_096},
    ),
    (  # the first published form of Gemma 3 4B; 262,208 tokens by its class
        {"model_type": "gemma3", "vision_config": {"model_type": "siglip_vision_model"},
         "text_config": {"model_type": "gemma3_text", "hidden_size": 2560,
                         "intermediate_size": 10240, "num_hidden_layers": 34,
                         "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}},
        {"heads": 8, "kv_heads": 4, "head_dim": 256, "parameters": 3_880_263_168},
    ),
    (  # Qwen2 with windows above its 21st layer
        {"model_type": "qwen2", "num_hidden_layers": 28, "use_sliding_window": True,
         "sliding_window": 4096, "max_window_layers": 21, "max_position_embeddings": 131072},
        {"sliding_window": 4096, "full_layers": 21},
    ),
], ids=["mistral", "gemma3", "qwen2"])  # fmt: skip
def test_keys_left_out_are_the_class_s(tmp_path, fields, expected):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    a = resolve_target(str(tmp_path)).architecture
    assert {name: getattr(a, name) for name in expected} == expected


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_form_of_a_config_is_read_as_transformers_builds_it(data):
    """Or refused in one line, as transformers refuses it."""
    kind = data.draw(st.sampled_from(sorted(kinds())))
    fields = {**SIZES, "vocab_size": 1000, **HYBRIDS.get(kind, {}), **OLD_NAMES.get(kind, {})}
    form = st.sampled_from(("as it is", "as it is", "left out", "null"))
    changed = {}
    for name, value in fields.items():
        how = data.draw(form, label=name)
        if how != "left out":
            changed[name] = None if how == "null" else value
    changed["model_type"] = kind
    try:
        config, sizes = read_model(changed, "model")
    except InputError as error:
        assert "\n" not in str(error)
        return
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config_of(changed))
    except (TypeError, ValueError, RuntimeError, ZeroDivisionError, AssertionError):
        return
    routers = "e_score_correction_bias", "expert_bias"
    biases = [bias for name, bias in model.named_buffers() if name.endswith(routers)]
    built = sum(tensor.numel() for tensor in (*model.parameters(), *biases))
    assert sizes.parameters == pytest.approx(built, rel=1e-3)
    text = config.get_text_config(decoder=True)
    assert sizes.latent_rank or sizes.kv_heads == getattr(text, "num_key_value_heads", sizes.heads)


# Their classes' own experts are too large for a quick test, or more than three layers are asked.
LARGE = {"deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"}
LARGE |= {"kimi_linear", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next"}


@pytest.mark.parametrize("kind", sorted({*kinds(), "phi", "starcoder2"} - LARGE))
def test_a_plan_and_a_calibration_know_the_same_model(tmp_path, kind):
    fields = {**SIZES, "vocab_size": 1000, "pad_token_id": 0, **HYBRIDS.get(kind, {})}
    if kind not in HYBRIDS:
        del fields["head_dim"]  # the class's own
    (tmp_path / "config.json").write_text(json.dumps(fields | {"model_type": kind}))
    loaded = load_model(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    planned = resolve_target(str(tmp_path), approximate=True)
    assert loaded.architecture.hash == planned.architecture.hash


def test_a_known_name_needs_no_transformers():
    name = sorted(load_targets())[0]
    code = "import sys; sys.modules['transformers'] = sys.modules['torch'] = None\n"
    code += f"from costmodel.catalog import resolve_target\nprint(resolve_target({name!r}).name)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == name
