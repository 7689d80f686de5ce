"""The sizes of a target in a Hugging Face config, for every model kind whose cost is understood.

A field that a config.json leaves out has the default of that kind in transformers, since
transformers would build that model from it. A kind that is read here can be planned for; the
decoder runs fewer kinds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from costmodel.errors import InputError, shown
from costmodel.hf_kinds import KINDS, Fields, ModelKind, flag, whole
from costmodel.hf_layers import (
    expert_sizes,
    gemma_extras,
    latent_sizes,
    recurrent_sizes,
    windows,
    with_usual_names,
)

# Kinds whose sizes are those of another, under the same names.
SAME = {"gemma4_unified_text": "gemma4_text", "kimi_k2": "deepseek_v3"}
# Other kinds whose FFN has two matrices.
UNGATED = frozenset(
    (
        "arcee", "biogpt", "gpt2", "gpt_bigcode", "jais2", "nemotron", "opt", "persimmon", "phi",
        "starcoder2",
    )
)  # fmt: skip
# The usual names of a mixture's sizes, the first that a config has.
EXPERT_FIELDS = {
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "active_experts": ("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k"),
    "expert_ffn": ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size"),
}


def architecture_fields(config: Any, name: str | None) -> dict[str, Any]:
    """Keyword arguments for `ModelArchitecture`; of a multimodal model its text part's.

    Raises InputError.
    """
    fields = _text_fields(config)
    label = _kind(fields)
    kind, fields = KINDS[label], with_usual_names(fields, label)
    result = _sizes(fields, kind, label, name)
    if label != "gpt_neox" and not kind.latent:
        result["kv_heads"] = whole(fields, "num_key_value_heads", result["heads"])
    named = isinstance(kind.qk_norm, str)
    result["qk_norm"] = flag(fields, str(kind.qk_norm), False) if named else kind.qk_norm
    result |= {"layer_norms": kind.norms, "sinks": kind.sinks}
    result |= _biases(fields, kind, label)
    result |= windows(fields, kind, result["layers"], label)
    if label == "gpt_neox":
        result["gated_ffn"] = False
        result["parallel_residual"] = flag(fields, "use_parallel_residual", True)
    if kind.recurrent:
        result |= recurrent_sizes(fields, kind, label, result["layers"])
    sparse = label != "nemotron_h" or "moe" in fields["layer_types"]
    if kind.experts and sparse and fields.get("num_local_experts") != 0:
        result |= expert_sizes(fields, kind, result["layers"])
    if label == "nemotron_h" and "moe" in fields["layer_types"]:
        result["dense_layers"] = fields["layer_types"].count("mlp")
    if kind.latent:
        result |= latent_sizes(fields)
    if label in ("gemma3n_text", "gemma4_text"):
        result |= gemma_extras(fields, label, result)
    return result


def is_known_kind(config: Any) -> bool:
    """Whether the sizes of the config's kind are read as transformers does."""
    return _text_fields(config).get("model_type") in KINDS


def usual_fields(config: Any, name: str | None) -> dict[str, Any]:
    """As `architecture_fields`, for any kind, by the usual names of a config's fields.

    Shared experts, dense layers among sparse ones, norms and biases are left out: enough for
    the shapes of a model that is decoded, not for the price of one that is planned.
    """
    fields = _text_fields(config)
    label = _label(fields)
    result = _sizes(fields, ModelKind(tied=True), label, name)
    if fields.get("multi_query"):
        result["kv_heads"] = 1
    else:
        result["kv_heads"] = whole(fields, "num_key_value_heads", result["heads"])
    result["gated_ffn"] = label not in UNGATED
    result["qkv_bias"] = fields.get("attention_bias") is True
    experts = {
        size: next((fields[field] for field in names if type(fields.get(field)) is int), 0)
        for size, names in EXPERT_FIELDS.items()
    }
    if all(experts.values()) and experts["active_experts"] <= experts["experts"]:
        result |= experts
    if fields.get("kv_lora_rank"):
        result |= latent_sizes(fields)
    return result


def _sizes(fields: Fields, kind: ModelKind, label: str, name: str | None) -> dict[str, Any]:
    """The sizes that every kind has; a kind that is not known may leave out that of its FFN."""
    hidden, heads = whole(fields, "hidden_size"), whole(fields, "num_attention_heads")
    width = None if label in KINDS else 4 * hidden
    if kind.experts == "moe_intermediate_size" and not kind.dense:
        # No layer has an FFN of its own, except in a Nemotron-H without experts.
        width = whole(fields, kind.experts) if "intermediate_size" not in fields else None
    return {
        "name": name or str(fields.get("_name_or_path") or label),
        "layers": whole(fields, "num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": _head_dim(fields, kind, label, hidden, heads),
        "ffn": whole(fields, "intermediate_size", width),
        "vocab": whole(fields, "vocab_size"),
        "tied": flag(fields, "tie_word_embeddings", kind.tied),
    }


def _text_fields(config: Any) -> Fields:
    """The fields of a config; of a multimodal model's, those of its text part."""
    fields = config_fields(config)
    if isinstance(fields.get("text_config"), Mapping) and fields["text_config"]:
        fields = {"tie_word_embeddings": fields.get("tie_word_embeddings")} | fields["text_config"]
    label = str(fields.get("model_type"))
    return {**fields, "model_type": SAME[label]} if label in SAME else fields


def config_fields(config: Any) -> Fields:
    """The fields of a Hugging Face config: of an object with `to_dict`, or the mapping itself."""
    if isinstance(config, Mapping):
        return config
    to_dict = getattr(config, "to_dict", None)
    if not callable(to_dict):
        raise InputError(
            "a target config must be a mapping or a transformers config,"
            f" not {type(config).__name__}"
        )
    fields: dict[str, Any] = to_dict()
    usual_names: Mapping[str, str] = getattr(config, "attribute_map", None) or {}
    return fields | {
        usual: fields[own] for usual, own in usual_names.items() if fields.get(own) is not None
    }


def _label(fields: Fields) -> str:
    """The name of the model's kind; not of an encoder-decoder model."""
    if fields.get("is_encoder_decoder"):
        raise InputError(
            "encoder-decoder models are not supported", hint="Name a decoder-only causal LM"
        )
    label = fields.get("model_type")
    if label is None:
        raise InputError(
            "the target's config has no field 'model_type'",
            hint="Check that the folder's config.json is a Hugging Face model config",
        )
    if not isinstance(label, str):
        raise InputError("the field 'model_type' of the target's config must be a text")
    return label


def _kind(fields: Fields) -> str:
    kind = _label(fields)
    for part in ("text_config", "vision_config", "audio_config"):
        if isinstance(fields.get(part), Mapping):
            raise InputError(
                f"a multimodal model without a readable 'text_config' (it has a '{part}')",
                hint="Name a causal LM",
            )
    if kind not in KINDS:
        raise InputError(
            f"the model kind {shown(kind)} is not supported",
            hint=f"Kinds whose cost is known: {', '.join(KINDS)}",
        )
    return kind


def _head_dim(fields: Fields, kind: ModelKind, label: str, hidden: int, heads: int) -> int:
    if kind.latent or (label not in KINDS and fields.get("kv_lora_rank")):
        return whole(fields, "qk_nope_head_dim") + whole(fields, "qk_rope_head_dim")
    if fields.get("head_dim") is not None and label != "gpt_neox":
        return whole(fields, "head_dim")
    if kind.head_dim:
        return kind.head_dim  # whatever hidden and heads are
    if hidden % heads:
        raise InputError(
            f"the target's config has no 'head_dim', and hidden_size ({hidden}) is not a"
            f" multiple of num_attention_heads ({heads})"
        )
    return hidden // heads


def _biases(fields: Fields, kind: ModelKind, label: str) -> dict[str, bool]:
    if label == "gpt_neox":
        attention = flag(fields, "attention_bias", True)
        return {
            "qkv_bias": attention,
            "output_bias": attention,
            "ffn_bias": True,
            "norm_bias": True,
        }
    if kind.bias in ("", "qkv"):
        return {"qkv_bias": kind.bias == "qkv"}
    attention = flag(fields, "attention_bias", kind.attention_bias)
    return {
        "qkv_bias": attention,
        "output_bias": attention and kind.bias == "config",
        "ffn_bias": kind.expert_bias or (label == "llama" and flag(fields, "mlp_bias", False)),
    }
