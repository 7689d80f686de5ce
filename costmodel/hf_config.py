"""From a Hugging Face config to the fields of `ModelArchitecture`.

Where a config.json leaves a field out, the default of that model kind in transformers
applies, since that is the model which would be built from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from costmodel.errors import InputError

SUPPORTED = ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gpt_neox")


def architecture_fields(config: Any, name: str | None) -> dict[str, Any]:
    """Keyword arguments for `ModelArchitecture`. Raises InputError."""
    fields = _as_mapping(config)
    kind = _kind(fields)
    hidden = _int(fields, "hidden_size")
    heads = _int(fields, "num_attention_heads")
    result: dict[str, Any] = {
        "name": name or str(fields.get("_name_or_path") or kind),
        "layers": _int(fields, "num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads if kind == "gpt_neox" else _int(fields, "num_key_value_heads", heads),
        "head_dim": _head_dim(fields, kind, hidden, heads),
        "ffn": _int(fields, "intermediate_size"),
        "vocab": _int(fields, "vocab_size"),
        "tied": _flag(fields, "tie_word_embeddings", False),
        "qk_norm": kind in ("qwen3", "qwen3_moe"),
        "sliding_window": _sliding_window(fields, kind),
    }
    result |= _biases(fields, kind)
    if kind == "gpt_neox":
        result["gated_ffn"] = False
        result["parallel_residual"] = _flag(fields, "use_parallel_residual", True)
    if kind == "qwen3_moe":
        result |= _experts(fields)
    return result


def _as_mapping(config: Any) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    to_dict = getattr(config, "to_dict", None)
    if not callable(to_dict):
        raise InputError(
            "a target config must be a mapping or a transformers config,"
            f" not {type(config).__name__}"
        )
    fields: Mapping[str, Any] = to_dict()
    return fields


def _kind(fields: Mapping[str, Any]) -> str:
    if fields.get("is_encoder_decoder"):
        raise InputError(
            "encoder-decoder models are not supported", hint="Name a decoder-only causal LM"
        )
    for part in ("text_config", "vision_config", "audio_config"):
        if isinstance(fields.get(part), Mapping):
            raise InputError(
                f"multimodal models are not supported (the config has a '{part}')",
                hint="Name a text-only causal LM",
            )
    kind = fields.get("model_type")
    if kind is None:
        raise InputError(
            "the target's config has no field 'model_type'",
            hint="Check that the folder's config.json is a Hugging Face model config",
        )
    if kind not in SUPPORTED:
        raise InputError(
            f"the model kind '{kind}' is not supported",
            hint=f"Supported kinds: {', '.join(SUPPORTED)}",
        )
    return str(kind)


def _int(fields: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = fields.get(field)
    if value is None:
        value = default
    if value is None:
        raise InputError(f"the target's config has no field '{field}'")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(
            f"the field '{field}' of the target's config must be a whole number above 0"
            f" (is {value!r})"
        )
    return value


def _flag(fields: Mapping[str, Any], field: str, default: bool) -> bool:
    value = fields.get(field)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InputError(f"the field '{field}' of the target's config must be true or false")
    return value


def _head_dim(fields: Mapping[str, Any], kind: str, hidden: int, heads: int) -> int:
    if fields.get("head_dim") is not None and kind != "gpt_neox":
        return _int(fields, "head_dim")
    if kind == "qwen3":
        return 128  # transformers' default of Qwen3, whatever hidden and heads are
    if hidden % heads:
        raise InputError(
            f"the target's config has no 'head_dim', and hidden_size ({hidden}) is not a"
            f" multiple of num_attention_heads ({heads})"
        )
    return hidden // heads


def _biases(fields: Mapping[str, Any], kind: str) -> dict[str, bool]:
    if kind == "qwen2":
        return {"qkv_bias": True}
    if kind == "gpt_neox":
        attention = _flag(fields, "attention_bias", True)
        return {
            "qkv_bias": attention,
            "output_bias": attention,
            "ffn_bias": True,
            "norm_bias": True,
        }
    if kind == "mistral":
        return {}
    attention = _flag(fields, "attention_bias", False)
    return {
        "qkv_bias": attention,
        "output_bias": attention,
        "ffn_bias": kind == "llama" and _flag(fields, "mlp_bias", False),
    }


def _sliding_window(fields: Mapping[str, Any], kind: str) -> int | None:
    """The window where every layer slides; None where none does or it covers all positions."""
    if kind not in ("qwen2", "qwen3", "qwen3_moe", "mistral"):
        return None
    if kind != "mistral" and not _flag(fields, "use_sliding_window", False):
        return None
    # transformers builds a Mistral without this field with a window of 4096.
    default = 4096 if kind == "mistral" and "sliding_window" not in fields else None
    if fields.get("sliding_window", default) is None:
        return None
    window = _int(fields, "sliding_window", default)
    layer_types = fields.get("layer_types")
    if isinstance(layer_types, (list, tuple)) and layer_types:
        sliding = sum(kind_of_layer == "sliding_attention" for kind_of_layer in layer_types)
        if sliding == 0:
            return None
        if sliding < len(layer_types):
            raise InputError(
                "targets in which only some layers use sliding attention are not supported"
            )
    positions = fields.get("max_position_embeddings")
    if isinstance(positions, int) and window >= positions:
        return None
    return window


def _experts(fields: Mapping[str, Any]) -> dict[str, int]:
    if _int(fields, "decoder_sparse_step", 1) != 1 or fields.get("mlp_only_layers"):
        raise InputError(
            "mixtures of experts with some dense layers are not supported"
            " (decoder_sparse_step, mlp_only_layers)"
        )
    field = "num_experts" if fields.get("num_experts") is not None else "num_local_experts"
    return {
        "experts": _int(fields, field),
        "active_experts": _int(fields, "num_experts_per_tok"),
        "expert_ffn": _int(fields, "moe_intermediate_size"),
    }
