"""The DFlash drafter against a straight-line reference, and the checkpoints it loads."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from costmodel.errors import InputError
from decoder.drafters.checkpoint import read_config
from decoder.drafters.dflash.drafter import DFlashDrafter
from decoder.drafters.dflash.model import EMBEDDING, HEAD, DFlashModel
from decoder.model.runtime.linear import plain_state
from tests.decoder import draft_models as made
from tests.decoder.draft_models import PROMPT, VOCAB, dflash_folder, draft_target, rms, rounds
from tests.decoder.models import request

pytestmark = pytest.mark.cpu_kind


def inner(**changed):
    return {"dflash_config": made.DFLASH["dflash_config"] | changed}


def whole(depth=4, width=VOCAB):
    return request(depth, width, whole=True)


def frequencies(config):
    """Rotary frequencies by their formulas; llama3's from the Llama 3.1 release."""
    width = config["head_dim"]
    plain = [config["rope_theta"] ** (-2 * i / width) for i in range(width // 2)]
    scaling = config.get("rope_scaling")
    if not scaling:
        return torch.tensor(plain)
    if scaling["rope_type"] == "linear":
        return torch.tensor(plain) / scaling["factor"]
    first, last = scaling["low_freq_factor"], scaling["high_freq_factor"]
    changed = []
    for frequency in plain:
        turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
        share = min(max((turns - first) / (last - first), 0.0), 1.0)
        changed.append(share * frequency + (1 - share) * frequency / scaling["factor"])
    return torch.tensor(changed)


def around(part, name, rows):
    """A sublayer's input and a function for its output: as they are, or between convolutions."""
    base = part.get(f"{name}_conv.base_kernel")
    if base is None:
        return rows, lambda outputs: outputs
    moved = rows @ part[f"{name}_conv.kernel_projection.weight"].T
    moved = moved.view(len(rows), *base.shape[:2], -1)
    group = torch.arange(rows.shape[1]) * moved.shape[-1] // rows.shape[1]

    def convolved(side, values):
        outputs = torch.zeros_like(values)
        for i, t in np.ndindex(len(values), base.shape[1]):
            if i >= t:
                outputs[i] += (base[side, t] + moved[i, side, t, group]) * values[i - t]
        return outputs

    return convolved(0, rows), lambda outputs: convolved(1, outputs)


def reference(config, tensors, target, context, offset=1):
    """q [gamma, vocab] after `context`."""
    states = reference_states(config, tensors, target, context, offset)
    return (states @ target.head_weight().T).softmax(-1)


def reference_states(config, tensors, target, context, offset=1):
    """What the head takes [gamma, hidden]: everything anew, one layer after the other."""
    eps, width = config["rms_norm_eps"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    inner = config["dflash_config"]
    states = made.plain_states(target, context[:-1])
    features = torch.cat([states[i + offset] for i in inner["target_layer_ids"]], dim=-1)
    past = rms(features @ tensors["fc.weight"].T, tensors["hidden_norm.weight"], eps)
    masks = [inner["mask_token_id"]] * (config["block_size"] - 1)
    hidden = target.embed(torch.tensor([int(context[-1]), *masks]))
    hidden = hidden * inner.get("input_embedding_scale", 1.0)
    cached, size = len(past), len(hidden)
    positions, speeds = torch.arange(cached + size), frequencies(config)
    for i, kind in enumerate(config["layer_types"]):
        own = {name.partition(f"layers.{i}.")[2]: tensor for name, tensor in tensors.items()}
        part = {name: tensor for name, tensor in own.items() if name}

        def project(name, rows, part=part):
            bias = part.get(f"self_attn.{name}_proj.bias", torch.zeros(()))
            return rows @ part[f"self_attn.{name}_proj.weight"].T + bias

        normed = rms(hidden, part["input_layernorm.weight"], eps)
        block, after = around(part, "attention", normed)
        both = torch.cat((past, block))
        query = project("q", block).view(size, heads, width)
        key = project("k", both).view(-1, kv_heads, width)
        value = project("v", both).view(-1, kv_heads, width)
        query = rms(query, part["self_attn.q_norm.weight"], eps)
        query = made.turned(query, positions[cached:], speeds)
        key = made.turned(rms(key, part["self_attn.k_norm.weight"], eps), positions, speeds)
        key, value = (one.repeat_interleave(heads // kv_heads, dim=1) for one in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / width**0.5
        ahead = positions[None, :] - positions[cached:, None]
        flags = (config.get("is_causal"), inner.get("causal"), inner.get("causal_head"))
        causal = next((flag for flag in flags if flag is not None), None)
        if causal or (causal is None and kind == "sliding_attention"):
            scores = scores.masked_fill(ahead > 0, -torch.inf)
        if kind == "sliding_attention":
            scores = scores.masked_fill(ahead.abs() >= config["sliding_window"], -torch.inf)
        drawn = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).reshape(size, -1)
        hidden = hidden + after(project("o", drawn))
        normed = rms(hidden, part["post_attention_layernorm.weight"], eps)
        rows, after = around(part, "mlp", normed)
        gate = rows @ part["mlp.gate_proj.weight"].T
        up = rows @ part["mlp.up_proj.weight"].T
        hidden = hidden + after((gate * gate.sigmoid() * up) @ part["mlp.down_proj.weight"].T)
    normed = rms(hidden, tensors["norm.weight"], eps)
    shifted = inner.get("shift_label") or config.get("sample_from_anchor")
    return normed[0 if shifted else 1 :]


VARIANTS = {
    "qwen3": ("qwen3", {}),
    "llama": ("llama", {"rope_theta": 500000.0, "rope_scaling": made.LLAMA3_ROPE}),
    "linear-rope": ("qwen3", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "bias": ("qwen3", {"attention_bias": True}),
    "sliding": ("qwen3", made.WINDOWED),
    "sliding-both-ways": ("qwen3", made.WINDOWED | {"is_causal": False}),
    "causal": ("qwen3", {"is_causal": True}),
    "jetspec": ("qwen3", inner(causal_head=True)),
    "vllm-both-ways": ("qwen3", made.WINDOWED | inner(causal=False)),
    "shifted": ("qwen3", inner(shift_label=True)),
    "shifted-causal": ("qwen3", {"sample_from_anchor": True} | inner(causal=True)),
    "one-layer": (
        "qwen3",
        {
            "num_hidden_layers": 1, "layer_types": ["full_attention"], "num_attention_heads": 2,
            "num_key_value_heads": 1, "block_size": 2,
        },
    ),
}  # fmt: skip


@torch.inference_mode()
@pytest.mark.parametrize("variant", VARIANTS)
def test_several_rounds_are_the_references(tmp_path, variant):
    family, changed = VARIANTS[variant]
    prompt = [9] if variant in ("llama", "sliding") else PROMPT
    target = draft_target(family)
    folder, config, tensors = dflash_folder(tmp_path / "draft", **changed)
    drafter = DFlashDrafter(target, folder)
    for session, context in rounds(target, drafter, prompt, made.ACCEPTED):
        expected = reference(config, tensors, target, context)
        assert len(expected) == drafter.max_depth
        lattice = session.draft(context, whole(config["block_size"], 2 * VOCAB))
        torch.testing.assert_close(lattice.whole, expected, atol=1e-5, rtol=0)
        given = np.take_along_axis(lattice.whole.double().numpy(), lattice.tokens, axis=1)
        np.testing.assert_array_equal(lattice.probabilities, given)
        assert given.shape == expected.shape and (np.diff(given) <= 0).all()
        again = session.draft(context, whole(config["block_size"]))
        torch.testing.assert_close(again.whole, lattice.whole, atol=0, rtol=0)


def test_weights_that_are_no_numbers_propose_nothing(tmp_path):
    target = draft_target()
    folder = dflash_folder(tmp_path / "draft")[0]
    model = DFlashModel.load(folder, read_config(folder), torch.empty(0, dtype=target.dtype))
    model.norm.weight.fill_(torch.nan)
    drafter = DFlashDrafter(target, model)
    *_, (session, context) = rounds(target, drafter, PROMPT, [])
    lattice = session.draft(context, whole(width=5))
    assert (lattice.probabilities == 0).all()
    assert ((lattice.tokens >= 0) & (lattice.tokens < VOCAB)).all()


class TestCheckpoints:
    def test_the_published_layout_of_five_layers_is_read_and_saved(self, tmp_path):
        layers = {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5}
        folder, config, tensors = dflash_folder(tmp_path / "draft", **layers)
        assert len(tensors) == 58
        drafter = DFlashDrafter(draft_target(), folder)
        assert (drafter.max_depth, drafter.feature_layers) == (4, (1, 3, 5))
        drafter.model.save(tmp_path / "saved")
        assert json.loads((tmp_path / "saved" / "config.json").read_text()) == config
        saved = load_file(tmp_path / "saved" / "model.safetensors")
        for found in (plain_state(drafter.model), saved):
            assert set(found) == set(tensors)
            for name, tensor in tensors.items():
                torch.testing.assert_close(found[name], tensor, atol=0, rtol=0)
        DFlashDrafter(draft_target(), tmp_path / "saved")

    @torch.inference_mode()
    @pytest.mark.parametrize("own_tables", [False, True])
    def test_a_drafter_may_have_fewer_rows_of_padding(self, tmp_path, own_tables):
        """Then it drafts the tokens that it knows, whatever rows the target has beside."""
        less = VOCAB - 7
        config = made.DFLASH | {"vocab_size": less} | inner(mask_token_id=less - 1)
        tensors, target = made.random_tensors(made.dflash_shapes(config)), draft_target()
        head = target.head_weight()
        if own_tables:
            tensors |= {name: torch.randn(less, made.HIDDEN) for name in (EMBEDDING, HEAD)}
            head = tensors[HEAD]
        drafter = DFlashDrafter(target, made.write_checkpoint(tmp_path / "draft", config, tensors))
        session, context = next(rounds(target, drafter, PROMPT, [3]))
        table = tensors.get(EMBEDDING, target.model.get_input_embeddings().weight)
        embed = SimpleNamespace(model=target.model, embed=lambda tokens: table[tokens])
        states = reference_states(config, tensors, embed, context)
        expected = (states @ head[:less].T).softmax(-1)
        q = session.draft(context, whole()).whole
        torch.testing.assert_close(q[:, :less], expected, atol=1e-5, rtol=0)
        assert not q[:, less:].any()


BAD_CONFIGS = {
    "another target's layer and mask": (
        {"dflash_config": {"mask_token_id": 97, "target_layer_ids": [0, 2, 5]}},
        r"reads layer 5 of a target of 6 layers; its mask token 97 lies outside the vocabulary",
    ),
    "another target's layers": ({"num_target_layers": 36}, "target layers is 36, the target's"),
    "another target's vocabulary": ({"vocab_size": 151936}, "vocabulary is 151936"),
    "no mask": ({"dflash_config": {"target_layer_ids": [0, 2, 4]}}, "'mask_token_id' must be"),
    "no block": ({"block_size": 1}, "'block_size' must be a whole number of at least 2"),
    "heads that do not divide": ({"num_key_value_heads": 3}, "a divisor of num_attention_heads"),
    "no window": (made.WINDOWED | {"sliding_window": None}, "'sliding_window' must be"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act = 'gelu', which is not"),
    "DFlash 2": (inner(selector_rank=8), "selector_rank = 8, which is not supported"),
    "Domino": (inner(projector_type="domino"), "projector_type = 'domino', which is not"),
    "another family": ({"architectures": ["DFlashLagunaForCausalLM"]}, "DFlashLagunaForCausalLM"),
    "an unknown inner field": (inner(experts=4), "experts = 4, which is not supported"),
    "another feature width": ({"target_hidden_size": 48}, "target_hidden_size = 48, which is not"),
    "two causalities": ({"is_causal": False} | inner(causal_head=True), "is_causal = False and"),
    "two shifts": (
        {"sample_from_anchor": False} | inner(shift_label=True), "shift_label = True and",
    ),
    "two block sizes": (inner(block_size=8), "block_size = 5, and 8 in its dflash_config"),
    "a rope that changes": (
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "of type 'dynamic' is not supported",
    ),
    "a wider target": ({"hidden_size": 48}, "hidden size is 48, .*trained for this target"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_configs(tmp_path, case):
    changed, message = BAD_CONFIGS[case]
    width = changed.get("hidden_size", made.HIDDEN)
    folder, config, _ = dflash_folder(tmp_path / "draft", hidden_size=width)
    (folder / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(InputError, match=message):
        DFlashDrafter(draft_target(), folder)
