"""Architectures from Hugging Face configs, their hash and parameter counts."""

import dataclasses

import pytest

from costmodel.architecture import ModelArchitecture
from costmodel.catalog import find_target
from costmodel.errors import InputError
from costmodel.hf_kinds import kinds
from decoder.configs import read_model

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 1000,
    "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_MOE = LLAMA | {
    "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}  # fmt: skip


def read(**changes) -> ModelArchitecture:
    fields = {key: value for key, value in (LLAMA | changes).items() if value != "absent"}
    return read_model(fields, "test")[1]


def test_absent_fields_take_the_kind_s_defaults_and_each_kind_has_its_biases():
    assert read(num_key_value_heads="absent").kv_heads == 4
    assert read(tie_word_embeddings="absent").tied is False
    assert read(head_dim=24).head_dim == 24
    assert read(head_dim=None).head_dim == 16
    assert read(model_type="qwen3").head_dim == 128  # transformers' default of that kind
    assert read(model_type="qwen3").qk_norm is True
    assert read(model_type="gpt_neox").parallel_residual is True
    assert read(model_type="qwen2").qkv_bias and not read(model_type="qwen2").output_bias
    both = read(attention_bias=True, mlp_bias=True)
    assert both.qkv_bias and both.output_bias and both.ffn_bias
    # a layer gains 64 + 32 + 32 + 64 (attention) and 128 + 128 + 64 (FFN)
    assert both.parameters - read().parameters == 2 * (192 + 320)
    assert read(model_type="mistral", attention_bias=True, sliding_window=None).qkv_bias is False


def test_a_mixture_and_the_text_part_of_a_multimodal_model():
    a = read(**QWEN3_MOE)
    assert (a.experts, a.active_experts, a.expert_ffn) == (8, 2, 32)
    local = {k: v for k, v in QWEN3_MOE.items() if k != "num_experts"} | {"num_local_experts": 8}
    assert read(**local).hash == a.hash
    unused = read(**(QWEN3_MOE | {"intermediate_size": 999}))
    assert unused.hash == a.hash
    for kind, same in (("gemma3", "gemma3_text"), ("gemma4_unified", "gemma4_text")):
        text = LLAMA | {"model_type": f"{kind}_text", "sliding_window": 16, "num_hidden_layers": 6}
        text["hidden_size_per_layer_input"] = 0
        a = read_model({"model_type": kind, "text_config": text}, "test")[1]
        assert a.hash == read(**(text | {"model_type": same})).hash


GEMMA3 = {"model_type": "gemma3_text", "sliding_window": 16, "num_hidden_layers": 13}
WINDOW = {"sliding_window": 16}
QWEN2 = WINDOW | {"model_type": "qwen2"}


@pytest.mark.parametrize(("changes", "window", "full"), [
    (WINDOW | {"max_position_embeddings": 64}, 16, 0),
    ({"sliding_window": 64, "max_position_embeddings": 64}, None, 0),
    ({"sliding_window": None}, None, 0), ({}, 4096, 0), (QWEN2, None, 0),
    (QWEN2 | {"use_sliding_window": True}, None, 0),
    (QWEN2 | {"use_sliding_window": True, "max_window_layers": 0}, 16, 0),
    (WINDOW | {"model_type": "llama"}, None, 0),
    (WINDOW | {"layer_types": ["full_attention"] * 2}, None, 0),
    (WINDOW | {"layer_types": ["sliding_attention"] * 2}, 16, 0),
    (WINDOW | {"layer_types": ["full_attention", "sliding_attention"]}, 16, 1),
    (GEMMA3, 16, 2), (GEMMA3 | {"sliding_window_pattern": 4}, 16, 3),
    (WINDOW | {"model_type": "gemma2", "num_hidden_layers": 6}, 16, 3),
])  # fmt: skip
def test_sliding_window_only_where_it_is_active(changes, window, full):
    a = read(**({"model_type": "mistral"} | changes))
    assert (a.sliding_window, a.full_layers) == (window, full)


# Sizes that show every part of a kind, where its defaults or three layers do not.
HYBRIDS = {
    "qwen3_moe": {"decoder_sparse_step": 2, "mlp_only_layers": [0]},
    "deepseek_v3": {"n_shared_experts": 3},
    "ministral": {"head_dim": 16, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    "qwen3_5_text": {"full_attention_interval": 2},
    "qwen3_5_moe_text": {"full_attention_interval": 2, "shared_expert_intermediate_size": 48},
    "qwen3_next": {"mlp_only_layers": [1],
                   "layer_types": ["linear_attention", "linear_attention", "full_attention"]},
    "falcon_h1": {
        "mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_n_groups": 2, "mamba_rms_norm": True,
    },
    "nemotron_h": {
        "mamba_num_heads": 6, "mamba_head_dim": 24, "n_groups": 2, "tie_word_embeddings": False,
    },
    "deepseek_v32": {"index_n_heads": 6, "index_head_dim": 16, "index_topk": 9},
    "glm_moe_dsa": {"index_n_heads": 6, "indexer_types": ["full", "shared", "full"]},
    "kimi_linear": {"linear_num_heads": 6, "linear_head_dim": 16, "num_hidden_layers": 5,
                    "tie_word_embeddings": False},
    "granitemoehybrid": {"mamba_n_heads": 8, "layer_types": ["mamba", "attention", "mamba"]},
    "bamba": {"mamba_n_heads": 8, "mamba_n_groups": 2, "attn_layer_indices": [1]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "llama4_text": {"intermediate_size": 96, "intermediate_size_mlp": 80, "moe_layers": [0, 2]},
    "lfm2": {
        "layer_types": ["conv", "full_attention", "conv"], "conv_bias": True,
        "block_multiple_of": 16,
    },
    "gemma3n_text": {
        "num_kv_shared_layers": 1, "laurel_rank": 8, "hidden_size_per_layer_input": 12,
        "intermediate_size": [128, 128, 96],
    },
    "gemma4_text": {
        "num_kv_shared_layers": 1, "use_double_wide_mlp": True, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1, "global_head_dim": 40, "hidden_size_per_layer_input": 12,
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(kinds()))
def test_every_kind_has_the_parameters_that_transformers_builds(kind):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    experts = {  # fields of other kinds among them, which have no effect
        "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    }  # fmt: skip
    latent = {"kv_lora_rank": 24, "q_lora_rank": 12, "qk_rope_head_dim": 8, "v_head_dim": 20}
    sizes = {key: value for key, value in LLAMA.items() if key != "model_type"}
    sizes |= {"pad_token_id": 0, "num_hidden_layers": 3} | experts | latent
    sizes |= HYBRIDS.get(kind, {})
    config = transformers.AutoConfig.for_model(kind, **sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    routers = "e_score_correction_bias", "expert_bias"
    biases = [bias for name, bias in model.named_buffers() if name.endswith(routers)]
    expected = sum(tensor.numel() for tensor in (*model.parameters(), *biases))
    assert ModelArchitecture.from_hf_config(config).parameters == expected


@pytest.mark.parametrize(("changes", "message"), [
    ({"model_type": "absent"}, "model_type"),
    ({"model_type": 7}, "the model kind 7 is not known"),
    ({"model_type": "mamba"}, "the model kind 'mamba' is not supported"),
    ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
    ({"model_type": "clip"}, "'clip_text_model' is not supported"),
    ({"model_type": "my_own"}, "'my_own' is not known to transformers"),
    ({"hidden_size": None}, "'hidden_size'"),
    ({"num_hidden_layers": 0}, "'num_hidden_layers'"),
    ({"vocab_size": "many"}, "'vocab_size'"),
    ({"intermediate_size": True}, "'intermediate_size'"),
    ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings'"),
    ({"hidden_size": 63}, "hidden size"),
    ({"num_key_value_heads": 3}, "kv_heads"),
])  # fmt: skip
def test_errors_name_the_field(changes, message):
    with pytest.raises(InputError, match=message) as caught:
        read(**changes)
    assert "\n" not in str(caught.value)


def test_the_hash_covers_what_costs_and_a_dict_is_read_back_strictly():
    # Written down once: a change would orphan every stored profile.
    assert find_target("Qwen/Qwen3-8B").architecture.hash == "88c820071b16"
    a = read()
    assert len(a.hash) == 12
    assert dataclasses.replace(a, name="a fine-tune of it").hash == a.hash
    changed = {
        "layers": 3, "hidden": 80, "heads": 2, "kv_heads": 1, "head_dim": 8, "ffn": 64,
        "vocab": 999, "tied": False, "gated_ffn": False, "qk_norm": True, "qkv_bias": True,
        "output_bias": True, "ffn_bias": True, "norm_bias": True, "parallel_residual": True,
        "sliding_window": 9, "layer_norms": 4, "sinks": True,
    }  # fmt: skip
    hashes = {dataclasses.replace(a, **{key: value}).hash for key, value in changed.items()}
    assert len(hashes | {a.hash}) == len(changed) + 1
    for a in (read(), read(**QWEN3_MOE)):
        assert ModelArchitecture.from_dict(a.to_dict()) == a
    good = read().to_dict()
    bad = [
        ({"wings": 2}, "unknown architecture field 'wings'"), ({"experts": 4}, "together"),
        ({"layers": 2.5}, "layers must be a whole number"), ({"latent_rank": 8}, "together"),
        ({"experts": 2, "active_experts": 4, "expert_ffn": 8}, "must not exceed"),
        ({"full_layers": 1}, "beside a sliding_window"), ({"shared_ffn": 8}, "belong to a mixture"),
        ({"tied": 1}, "tied must be true or false"),
    ]  # fmt: skip
    for fields, message in bad:
        with pytest.raises(InputError, match=message):
            ModelArchitecture.from_dict(good | fields)
