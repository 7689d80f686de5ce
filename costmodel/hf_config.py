"""The sizes of a target in a Hugging Face config, for every model kind whose cost is understood.

A field that a config.json leaves out has the default of that kind in transformers, since
transformers would build that model from it. A kind that is read here can be planned for; the
decoder runs fewer kinds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from costmodel.errors import InputError, shown

MOST = 10**9  # of any size, beyond every model
Fields = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelKind:
    """What models of a kind have beside the sizes in their config.

    bias       attention projections with biases: none, `config` (query, key, value and output,
               where `attention_bias` says so), `config_qkv` (without output), or always `qkv`
    head_dim   default where the config leaves it out (0: hidden over heads)
    norms      norms over the hidden width in one layer
    qk_norm    queries and keys are normalised per head: never, always, or by a field
    window     sliding windows: never; `config` where `sliding_window` is set; `flag` where
               `use_sliding_window` is set too
    pattern    every such layer reads the whole context, unless `layer_types` says it (0: none)
    experts    a mixture of experts, the width of one in this field
    dense      which of its layers are dense: none, by a `step` and a list, or the `first` ones,
               whose kinds have shared experts too
    router_bias, expert_bias, latent  of the router, of the experts; latent attention
    """

    bias: Literal["", "config", "config_qkv", "qkv"] = "config"
    attention_bias: bool = False
    head_dim: int = 0
    tied: bool = False
    norms: int = 2
    qk_norm: bool | str = False
    sinks: bool = False
    window: Literal["", "config", "flag"] = ""
    pattern: int = 0
    experts: Literal["", "intermediate_size", "moe_intermediate_size"] = ""
    dense: Literal["", "step", "first"] = ""
    router_bias: bool = False
    expert_bias: bool = False
    latent: bool = False


KINDS = {
    "llama": ModelKind(),
    "mistral": ModelKind(bias="", window="config"),
    "mixtral": ModelKind(bias="", window="config", experts="intermediate_size"),
    "qwen2": ModelKind(bias="qkv", window="flag"),
    "qwen3": ModelKind(head_dim=128, qk_norm=True, window="flag"),
    "qwen3_moe": ModelKind(
        qk_norm=True, window="flag", experts="moe_intermediate_size", dense="step"
    ),
    "gemma": ModelKind(head_dim=256, tied=True),
    "gemma2": ModelKind(head_dim=256, tied=True, norms=4, window="config", pattern=2),
    "gemma3_text": ModelKind(
        head_dim=256, tied=True, norms=4, qk_norm=True, window="config", pattern=6
    ),
    "phi3": ModelKind(bias="", window="config"),
    "smollm3": ModelKind(),
    "glm": ModelKind(bias="config_qkv", attention_bias=True, head_dim=128),
    "glm4": ModelKind(bias="config_qkv", attention_bias=True, head_dim=128, norms=4),
    "glm4_moe": ModelKind(
        bias="config_qkv", qk_norm="use_qk_norm", experts="moe_intermediate_size", dense="first",
        router_bias=True,
    ),
    "gpt_oss": ModelKind(
        attention_bias=True, head_dim=64, sinks=True, window="config", pattern=2,
        experts="intermediate_size", router_bias=True, expert_bias=True,
    ),
    "deepseek_v2": ModelKind(experts="moe_intermediate_size", dense="first", latent=True),
    "deepseek_v3": ModelKind(
        experts="moe_intermediate_size", dense="first", router_bias=True, latent=True
    ),
    "gpt_neox": ModelKind(),
}  # fmt: skip


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
    fields = config_fields(config)
    if isinstance(fields.get("text_config"), Mapping) and fields["text_config"]:
        fields = {"tie_word_embeddings": fields.get("tie_word_embeddings")} | fields["text_config"]
    label = _kind(fields)
    kind = KINDS[label]
    result = _sizes(fields, kind, label, name)
    if label != "gpt_neox" and not kind.latent:
        result["kv_heads"] = _int(fields, "num_key_value_heads", result["heads"])
    named = isinstance(kind.qk_norm, str)
    result["qk_norm"] = _flag(fields, str(kind.qk_norm), False) if named else kind.qk_norm
    result |= {"layer_norms": kind.norms, "sinks": kind.sinks}
    result |= _biases(fields, kind, label)
    result |= _windows(fields, kind, result["layers"], label)
    if label == "gpt_neox":
        result["gated_ffn"] = False
        result["parallel_residual"] = _flag(fields, "use_parallel_residual", True)
    if kind.experts:
        result |= _experts(fields, kind, result["layers"])
    if kind.latent:
        result |= _latent(fields)
    return result


def is_known_kind(config: Any) -> bool:
    """Whether the sizes of the config's kind are read as transformers does."""
    fields = config_fields(config)
    return isinstance(fields.get("text_config"), Mapping) or fields.get("model_type") in KINDS


def usual_fields(config: Any, name: str | None) -> dict[str, Any]:
    """As `architecture_fields`, for any kind, by the usual names of a config's fields.

    Shared experts, dense layers among sparse ones, norms and biases are left out: enough for
    the shapes of a model that is decoded, not for the price of one that is planned.
    """
    fields = config_fields(config)
    label = _label(fields)
    result = _sizes(fields, ModelKind(tied=True), label, name)
    if fields.get("multi_query"):
        result["kv_heads"] = 1
    else:
        result["kv_heads"] = _int(fields, "num_key_value_heads", result["heads"])
    result["gated_ffn"] = label not in UNGATED
    result["qkv_bias"] = fields.get("attention_bias") is True
    experts = {
        size: next((fields[field] for field in names if type(fields.get(field)) is int), 0)
        for size, names in EXPERT_FIELDS.items()
    }
    if all(experts.values()) and experts["active_experts"] <= experts["experts"]:
        result |= experts
    return result


def _sizes(fields: Fields, kind: ModelKind, label: str, name: str | None) -> dict[str, Any]:
    """The sizes that every kind has; a kind that is not known may leave out that of its FFN."""
    hidden, heads = _int(fields, "hidden_size"), _int(fields, "num_attention_heads")
    return {
        "name": name or str(fields.get("_name_or_path") or label),
        "layers": _int(fields, "num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": _head_dim(fields, kind, label, hidden, heads),
        "ffn": _int(fields, "intermediate_size", None if label in KINDS else 4 * hidden),
        "vocab": _int(fields, "vocab_size"),
        "tied": _flag(fields, "tie_word_embeddings", kind.tied),
    }


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


def _int(fields: Fields, field: str, default: int | None = None, least: int = 1) -> int:
    value = fields.get(field)
    if value is None:
        value = default
    if value is None:
        raise InputError(f"the target's config has no field '{field}'")
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST:
        raise InputError(
            f"the field '{field}' of the target's config must be a whole number from {least} to"
            f" {MOST} (is {shown(value)})"
        )
    return value


def _flag(fields: Fields, field: str, default: bool) -> bool:
    value = fields.get(field)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InputError(f"the field '{field}' of the target's config must be true or false")
    return value


def _head_dim(fields: Fields, kind: ModelKind, label: str, hidden: int, heads: int) -> int:
    if kind.latent:
        return _int(fields, "qk_nope_head_dim") + _int(fields, "qk_rope_head_dim")
    if fields.get("head_dim") is not None and label != "gpt_neox":
        return _int(fields, "head_dim")
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
        attention = _flag(fields, "attention_bias", True)
        return {
            "qkv_bias": attention,
            "output_bias": attention,
            "ffn_bias": True,
            "norm_bias": True,
        }
    if kind.bias in ("", "qkv"):
        return {"qkv_bias": kind.bias == "qkv"}
    attention = _flag(fields, "attention_bias", kind.attention_bias)
    return {
        "qkv_bias": attention,
        "output_bias": attention and kind.bias == "config",
        "ffn_bias": kind.expert_bias or (label == "llama" and _flag(fields, "mlp_bias", False)),
    }


def _windows(fields: Fields, kind: ModelKind, layers: int, label: str) -> dict[str, Any]:
    """`sliding_window` and `full_layers`; none where the window covers all positions."""
    if not kind.window:
        return {}
    if kind.window == "flag" and not _flag(fields, "use_sliding_window", False):
        return {}
    # transformers builds a Mistral without this field with a window of 4096.
    default = 4096 if label == "mistral" and "sliding_window" not in fields else None
    if fields.get("sliding_window", default) is None:
        return {}
    window = _int(fields, "sliding_window", default)
    positions = fields.get("max_position_embeddings")
    full = _full_layers(fields, kind, layers)
    if full == layers or (isinstance(positions, int) and window >= positions):
        return {}
    return {"sliding_window": window, "full_layers": full}


def _full_layers(fields: Fields, kind: ModelKind, layers: int) -> int:
    """The number of layers without a sliding window."""
    types = fields.get("layer_types")
    if isinstance(types, (list, tuple)) and types:
        return sum(layer != "sliding_attention" for layer in types)
    if not kind.pattern:
        return 0
    return layers // _int(fields, "sliding_window_pattern", kind.pattern)


def _experts(fields: Fields, kind: ModelKind, layers: int) -> dict[str, Any]:
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    field = next((name for name in names if fields.get(name) is not None), names[-1])
    experts, width = _int(fields, field), _int(fields, kind.experts)
    first = kind.dense == "first"
    shared = _int(fields, "n_shared_experts", 0, least=0) if first else 0
    return {
        "experts": experts,
        "active_experts": _int(fields, "num_experts_per_tok"),
        "expert_ffn": width,
        "shared_ffn": shared * width,
        "dense_layers": _dense_layers(fields, kind, layers),
        "router_bias": kind.router_bias,
    }


def _dense_layers(fields: Fields, kind: ModelKind, layers: int) -> int:
    """The layers of a mixture of experts that have a dense FFN instead."""
    if kind.dense == "first":
        return min(_int(fields, "first_k_dense_replace", 0, least=0), layers)
    if not kind.dense:
        return 0
    step = _int(fields, "decoder_sparse_step", 1)
    listed = fields.get("mlp_only_layers") or ()
    if not isinstance(listed, (list, tuple)) or not all(isinstance(i, int) for i in listed):
        raise InputError("the field 'mlp_only_layers' of the target's config must list layers")
    return sum(i in listed or (i + 1) % step != 0 for i in range(layers))


def _latent(fields: Fields) -> dict[str, int]:
    rank = fields.get("q_lora_rank")
    return {
        "query_rank": 0 if rank is None else _int(fields, "q_lora_rank"),
        "latent_rank": _int(fields, "kv_lora_rank"),
        "rope_dim": _int(fields, "qk_rope_head_dim"),
        "value_dim": _int(fields, "v_head_dim"),
    }
