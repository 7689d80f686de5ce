"""Layers of a Hugging Face config that are not all alike, or keep other than keys and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from costmodel.errors import InputError, shown
from costmodel.hf_kinds import Fields, ModelKind, flag, whole

_BLOCKS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_TWO = ("linear_attention", "full_attention")
_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}
# The fields of a recurrent layer's sizes, with their defaults in transformers.
_STATES: dict[str, dict[str, tuple[str, int | bool]]] = {
    "gated_delta": {
        "state_heads": ("linear_num_value_heads", 32),
        "state_groups": ("linear_num_key_heads", 16),
        "state_key_dim": ("linear_key_head_dim", 128),
        "state_value_dim": ("linear_value_head_dim", 128),
        "conv_width": ("linear_conv_kernel_dim", 4),
    },
    "falcon_h1": {
        "state_heads": ("mamba_n_heads", 128),
        "state_groups": ("mamba_n_groups", 1),
        "state_key_dim": ("mamba_d_state", 256),
        "conv_width": ("mamba_d_conv", 4),
        "conv_bias": ("mamba_conv_bias", True),
        "state_norm": ("mamba_rms_norm", False),
    },
    "mamba2": {
        "state_heads": ("mamba_n_heads", 128),
        "state_groups": ("mamba_n_groups", 1),
        "state_key_dim": ("mamba_d_state", 256),
        "state_value_dim": ("mamba_d_head", 64),
        "conv_width": ("mamba_d_conv", 4),
        "conv_bias": ("mamba_conv_bias", True),
    },
    "kimi_delta": {
        "state_heads": ("linear_num_heads", 32),
        "state_groups": ("linear_num_heads", 32),
        "state_key_dim": ("linear_head_dim", 128),
        "state_value_dim": ("linear_head_dim", 128),
        "conv_width": ("linear_conv_kernel_dim", 4),
    },
    "nemotron_h": {
        "state_heads": ("mamba_num_heads", 128),
        "state_groups": ("n_groups", 8),
        "state_key_dim": ("ssm_state_size", 128),
        "state_value_dim": ("mamba_head_dim", 64),
        "conv_width": ("conv_kernel", 4),
        "conv_bias": ("use_conv_bias", True),
    },
    "short_conv": {"conv_width": ("conv_L_cache", 3), "conv_bias": ("conv_bias", False)},
}
_WINDOWS = {"mistral": 4096, "gemma3n_text": 512, "gemma4_text": 512}
_PROJECTION_BIASES = ("mamba_proj_bias", "projectors_bias", "use_bias")


def with_usual_names(fields: Fields, label: str) -> Fields:
    """The fields with those that only this kind calls otherwise, or gives in another form."""
    if label == "nemotron_h":
        return {**fields, **_blocks(fields)}
    if label in _OTHERS:
        return {**fields, **_OTHERS[label](fields)}
    if label == "lfm2":
        return {**fields, **_liquid_sizes(fields)}
    if label == "llama4_text":
        return {**fields, **_chunks(fields)}
    widths = _listed(fields, "intermediate_size", int)
    if label == "gemma3n_text" and widths:
        return {**fields, "intermediate_size": widths[0], "ffn_widths": widths}
    return fields


def _listed(fields: Fields, field: str, kind: type) -> list[Any]:
    """The values of a list of one type; empty where the field is something else."""
    values = fields.get(field)
    listed = isinstance(values, (list, tuple)) and all(isinstance(value, kind) for value in values)
    return list(values) if listed and values else []


def _chunks(fields: Fields) -> dict[str, Any]:
    """Llama 4: windows that start anew, and experts in every so many layers."""
    rope = _listed(fields, "layer_types", str) or _listed(fields, "no_rope_layers", int)
    types = {"chunked_attention": "sliding_attention", 1: "sliding_attention"}
    sparse, layers = _listed(fields, "moe_layers", int), whole(fields, "num_hidden_layers")
    return {
        "sliding_window": fields.get("attention_chunk_size", 8192),
        "layer_types": [types.get(kind, "full_attention") for kind in rope],
        "intermediate_size": whole(fields, "intermediate_size_mlp", 16384),
        "moe_intermediate_size": whole(fields, "intermediate_size", 8192),
        "decoder_sparse_step": 1 if sparse else fields.get("interleave_moe_layer_step"),
        "mlp_only_layers": [i for i in range(layers) if i not in sparse] if sparse else [],
    }


def _blocks(fields: Fields) -> dict[str, Any]:
    """Layers of which each is one of attention, mamba2, FFN and mixture of experts."""
    if fields.get("moe_latent_size"):
        raise InputError("experts over a latent vector ('moe_latent_size') are not supported")
    types = _listed(fields, "layers_block_type", str) or _listed(fields, "layer_types", str)
    types = types or [_BLOCKS.get(c, c) for c in str(fields.get("hybrid_override_pattern") or "")]
    types = [_NAMES.get(kind, kind) for kind in types] or list(_BLOCKS.values())
    unknown = next((kind for kind in types if kind not in _BLOCKS.values()), None)
    if unknown is not None:
        raise InputError(f"a layer of the kind {shown(unknown)} is not supported")
    return {"layer_types": types, "num_hidden_layers": len(types)}


def _mamba_sizes(fields: Fields) -> dict[str, Any]:
    """Bamba and Granite 4, which without experts has the FFN that is beside them else."""
    types = [_NAMES.get(kind, kind) for kind in _listed(fields, "layer_types", str)]
    attending = _listed(fields, "attn_layer_indices", int)
    layers = range(whole(fields, "num_hidden_layers"))
    usual: dict[str, Any] = {"layer_types": types or [_TWO[i in attending] for i in layers]}
    if not isinstance(fields.get("mamba_d_head"), int):  # `auto`
        inner = whole(fields, "mamba_expand", 2) * whole(fields, "hidden_size")
        usual["mamba_d_head"] = inner // whole(fields, "mamba_n_heads", 128)
    if fields.get("num_local_experts") == 0:
        usual["intermediate_size"] = whole(fields, "shared_intermediate_size", 1024)
    return usual


def _kimi_sizes(fields: Fields) -> dict[str, Any]:
    """Kimi Linear's names, and those of its checkpoints in `linear_attn_config`."""
    given = fields.get("linear_attn_config") or {}
    layers = range(1, whole(fields, "num_hidden_layers") + 1)
    attending = _listed(given, "full_attn_layers", int) or layers[4::4]
    others = {
        "linear_num_heads": given.get("num_heads"),
        "linear_head_dim": given.get("head_dim"),
        "linear_conv_kernel_dim": given.get("short_conv_kernel_size"),
        "num_experts_per_tok": fields.get("num_experts_per_token"),
        "n_shared_experts": fields.get("num_shared_experts"),
    }
    usual = {name: value for name, value in others.items() if value is not None}
    if not _listed(fields, "layer_types", str):
        usual["layer_types"] = [_TWO[i in attending] for i in layers]
    return usual


def _liquid_sizes(fields: Fields) -> dict[str, Any]:
    """LFM2's names, and the width that its FFN is rounded to."""
    own = {"intermediate_size": "block_ff_dim", "tie_word_embeddings": "tie_embedding"}
    usual = {name: fields[other] for name, other in own.items() if fields.get(other) is not None}
    width = whole({**fields, **usual}, "intermediate_size")
    if flag(fields, "block_auto_adjust_ff_dim", True):
        step, factor = whole(fields, "block_multiple_of", 256), 1.0
        if isinstance(fields.get("block_ffn_dim_multiplier"), (int, float)):
            factor = fields["block_ffn_dim_multiplier"]
        width = step * -(-int(factor * int(2 * width / 3)) // step)
    attending = _listed(fields, "full_attn_idxs", int)
    if attending and not fields.get("layer_types"):
        layers = range(whole(fields, "num_hidden_layers"))
        usual["layer_types"] = ["full_attention" if i in attending else "conv" for i in layers]
    return {**usual, "intermediate_size": width}


_OTHERS: dict[str, Callable[[Fields], dict[str, Any]]] = {
    "granitemoehybrid": _mamba_sizes,
    "bamba": _mamba_sizes,
    "kimi_linear": _kimi_sizes,
    "lfm2_moe": lambda fields: {"first_k_dense_replace": fields.get("num_dense_layers", 2)},
}


def recurrent_sizes(fields: Fields, kind: ModelKind, label: str, layers: int) -> dict[str, Any]:
    """The layers that keep a state, those without attention or FFN, and the state's sizes."""
    biased = next((name for name in _PROJECTION_BIASES if flag(fields, name, False)), None)
    if biased is not None:
        raise InputError(f"recurrent layers with biased projections ('{biased}') are not supported")
    sizes: dict[str, Any] = {"recurrent": kind.recurrent, "gated_attention": kind.gated}
    for size, (field, default) in _STATES.get(label, _STATES.get(kind.recurrent, {})).items():
        if isinstance(default, bool):
            sizes[size] = flag(fields, field, default)
        else:
            sizes[size] = whole(fields, field, default)
    if label == "falcon_h1":
        inner = whole(fields, "mamba_expand", 2) * whole(fields, "hidden_size")
        if fields.get("mamba_d_ssm", 1024) is not None:
            inner = whole(fields, "mamba_d_ssm", 1024)
        sizes["state_value_dim"] = max(inner // sizes["state_heads"], 1)
        return sizes | {"recurrent_layers": layers}
    types = _mixers(fields, kind, layers)
    attending = types.count("full_attention")
    ffns = types.count("mlp") + types.count("moe")
    recurrent = layers - attending - ffns
    if not recurrent:  # as in the default of LFM2
        sizes = {"gated_attention": kind.gated}
    elif kind.recurrent != "short_conv":
        sizes["state_norm"] = True
    if label == "nemotron_h":
        sizes |= {"ffnless_layers": layers - ffns, "gated_ffn": False}
    return sizes | {"recurrent_layers": recurrent, "keyless_layers": layers - attending}


def _mixers(fields: Fields, kind: ModelKind, layers: int) -> list[str]:
    if types := _listed(fields, "layer_types", str):
        return types
    if kind.recurrent == "short_conv":
        return ["full_attention"] * layers
    step = whole(fields, "full_attention_interval", 4)
    return [_TWO[(i + 1) % step == 0] for i in range(layers)]


def gemma_extras(fields: Fields, label: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Shared keys, two shapes of attention and inputs of each layer, of Gemma 3n and 4."""
    hidden, layers, ffn = sizes["hidden"], sizes["layers"], sizes["ffn"]
    new = label == "gemma4_text"
    shared = whole(fields, "num_kv_shared_layers", 0 if new else min(15, layers - 1), least=0)
    types, step = _listed(fields, "layer_types", str), 6 if new else 5
    types = types or ["" if (i + 1) % step else "full_attention" for i in range(layers)]
    width = whole(fields, "hidden_size_per_layer_input", 256, least=0)
    table = whole(fields, "vocab_size_per_layer_input", 262144)
    other = layers * (3 * hidden * width + hidden) + width if width else 0
    result: dict[str, Any] = {
        "shared_kv_layers": shared,
        "shared_full_layers": types[layers - shared :].count("full_attention"),
        "lookup_weights": table * layers * width,
    }
    if new:
        if flag(fields, "use_double_wide_mlp", False):
            other += shared * 3 * hidden * ffn
        if flag(fields, "enable_moe_block", False):
            other += layers * hidden
            result |= {  # beside the FFN of the same layer, with a scale each and three more norms
                "experts": whole(fields, "num_experts"),
                "active_experts": whole(fields, "top_k_experts"),
                "expert_ffn": whole(fields, "moe_intermediate_size"),
                "shared_ffn": ffn,
                "router_bias": True,
                "layer_norms": 7,
            }
        result |= _global_shape(fields, sizes)
    else:
        widths = fields.get("ffn_widths") or [ffn] * layers
        other += 3 * hidden * (sum(widths) - layers * ffn)
        streams, rank = whole(fields, "altup_num_inputs", 4), whole(fields, "laurel_rank", 64)
        other += layers * (2 * hidden * rank + (3 + streams) * hidden + streams**2 + streams**3)
        other += 2 * (streams - 1) * hidden**2
    return result | {"other_weights": other}


def _global_shape(fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    """The attention of layers that read the whole context: fields, or overrides by layer."""
    overrides = fields.get("per_layer_config") or {}
    names = {"global_head_dim": "head_dim", "num_global_key_value_heads": "num_key_value_heads"}
    one, first = fields, next(iter(overrides.values()), None) if overrides else None
    if isinstance(first, Mapping):
        one = {name: first.get(other) for name, other in names.items()}
    head_dim, kv_heads = whole(one, "global_head_dim", 512), sizes["kv_heads"]
    one_projection = flag(fields, "attention_k_eq_v", False)
    if one_projection:
        kv_heads = whole(one, "num_global_key_value_heads", kv_heads)
    return {
        "full_head_dim": 0 if head_dim == sizes["head_dim"] else head_dim,
        "full_kv_heads": 0 if kv_heads == sizes["kv_heads"] else kv_heads,
        "full_key_is_value": one_projection,
    }


def windows(fields: Fields, kind: ModelKind, layers: int, label: str) -> dict[str, Any]:
    """`sliding_window` and `full_layers`; none where the window covers all positions."""
    if not kind.window:
        return {}
    if kind.window == "flag" and not flag(fields, "use_sliding_window", False):
        return {}
    # Of a kind that transformers builds with a window where its config has no such field.
    default = None if "sliding_window" in fields else _WINDOWS.get(label)
    if fields.get("sliding_window", default) is None:
        return {}
    window = whole(fields, "sliding_window", default)
    positions = fields.get("max_position_embeddings")
    full = _full_layers(fields, kind, layers)
    whole_text = isinstance(positions, int) and window >= positions and label != "gemma4_text"
    if full == layers or whole_text:
        return {}
    chunked = label == "llama4_text"
    return {"sliding_window": window, "full_layers": full, "chunked": chunked}


def _full_layers(fields: Fields, kind: ModelKind, layers: int) -> int:
    """The number of layers without a sliding window."""
    types = fields.get("layer_types")
    if isinstance(types, (list, tuple)) and types:
        return sum(layer != "sliding_attention" for layer in types)
    if not kind.pattern:
        return 0
    return layers // whole(fields, "sliding_window_pattern", kind.pattern)


def expert_sizes(fields: Fields, kind: ModelKind, layers: int) -> dict[str, Any]:
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    field = next((name for name in names if fields.get(name) is not None), names[-1])
    experts, width = whole(fields, field), whole(fields, kind.experts)
    first = kind.dense == "first"
    shared = width * whole(fields, "n_shared_experts", 0, least=0) if first else 0
    if kind.shared:
        shared = whole(fields, kind.shared)
    return {
        "experts": experts,
        "active_experts": whole(fields, "num_experts_per_tok"),
        "expert_ffn": width,
        "shared_ffn": shared,
        "shared_gate": bool(kind.shared) and kind.gated,
        "dense_layers": _dense_layers(fields, kind, layers),
        "router_bias": kind.router_bias,
    }


def _dense_layers(fields: Fields, kind: ModelKind, layers: int) -> int:
    """The layers of a mixture of experts that have a dense FFN instead."""
    types = fields.get("mlp_layer_types")
    if kind.dense == "first" and isinstance(types, (list, tuple)) and types:
        return sum(layer == "dense" for layer in types)
    if kind.dense == "first":
        return min(whole(fields, "first_k_dense_replace", kind.first_dense, least=0), layers)
    if not kind.dense:
        return 0
    step = whole(fields, "decoder_sparse_step", 1)
    listed = fields.get("mlp_only_layers") or ()
    if not isinstance(listed, (list, tuple)) or not all(isinstance(i, int) for i in listed):
        raise InputError("the field 'mlp_only_layers' of the target's config must list layers")
    return sum(i in listed or (i + 1) % step != 0 for i in range(layers))


def latent_sizes(fields: Fields) -> dict[str, int]:
    rank = fields.get("q_lora_rank")
    sizes = {
        "query_rank": 0 if rank is None else whole(fields, "q_lora_rank"),
        "latent_rank": whole(fields, "kv_lora_rank"),
        "rope_dim": whole(fields, "qk_rope_head_dim"),
        "value_dim": whole(fields, "v_head_dim"),
    }
    if fields.get("index_topk") is None:
        return sizes
    names = {"index_heads": "index_n_heads", "index_dim": "index_head_dim"}
    types = _listed(fields, "indexer_types", str)
    return sizes | {
        **{size: whole(fields, field) for size, field in names.items()},
        "index_topk": whole(fields, "index_topk"),
        "index_layers": types.count("full") if types else whole(fields, "num_hidden_layers"),
    }
