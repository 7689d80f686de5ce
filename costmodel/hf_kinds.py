"""The sizes of a target in its Hugging Face config, with what no config says of its kind."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from costmodel.errors import InputError, shown
from costmodel.fields import MOST, is_whole
from costmodel.hf_config import Fields, positions_of, text_fields
from costmodel.io import read_yaml, shipped_directory

_USUAL = {"qkv_bias": "attention_bias", "output_bias": "attention_bias"}
_STATE = ("state_heads", "state_groups", "state_key_dim", "state_value_dim", "conv_width")
_NO_STATE = {"recurrent": "", "conv_bias": False, "state_norm": False, **dict.fromkeys(_STATE, 0)}
ATTENDING = frozenset(
    ("full_attention", "sliding_attention", "chunked_attention", "indexed_attention")
)
_BLOCKS = {*ATTENDING, "linear_attention", "conv", "mlp", "moe"}
_WINDOWED = ("sliding_attention", "chunked_attention")
_PROJECTION_BIASES = ("mamba_proj_bias", "projectors_bias", "use_bias")
# The names of a mixture's sizes, the first that a config has.
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_ACTIVE = ("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k")
_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
_SHARED = (
    "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
)  # fmt: skip


@cache
def kinds() -> Mapping[str, Mapping[str, Any]]:
    """The kinds whose every part is counted, as in model_kinds.yaml."""
    table = read_yaml(shipped_directory() / "model_kinds.yaml")
    return {
        kind: {**_USUAL, **table.get(row.pop("like", None), {}), **row}
        for kind, row in table.items()
    }


def architecture_fields(
    config: Any, name: str | None, *, approximate: bool = False
) -> dict[str, Any]:
    """Keyword arguments for `ModelArchitecture`; of a multimodal model its text part's.

    approximate  read any kind by the usual names of its sizes, without norms and biases
    Raises InputError.
    """
    fields = text_fields(config)
    label = str(fields.get("model_type"))
    if fields.get("is_encoder_decoder"):
        raise InputError(
            "encoder-decoder models are not supported", hint="Name a decoder-only causal LM"
        )
    kind = kinds().get(label)
    if kind is None and not approximate:
        raise InputError(
            f"the model kind {shown(label)} is not supported",
            hint=f"Kinds whose cost is known: {', '.join(kinds())}",
        )
    fields = with_usual_names(fields, label)
    layers, hidden = whole(fields, "num_hidden_layers"), whole(fields, "hidden_size")
    heads = kv_heads = whole(fields, "num_attention_heads")
    ffn = count(fields, "intermediate_size") or count(fields, "moe_intermediate_size")
    if flag(fields, "multi_query"):
        kv_heads = 1
    elif not count(fields, "kv_lora_rank"):  # heads of latents are all alike
        needed = kind is not None and label != "gpt_neox"
        kv_heads = (whole if needed else count)(fields, "num_key_value_heads") or heads
    result: dict[str, Any] = {
        "name": name or str(fields.get("_name_or_path") or label),
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": count(fields, "head_dim") or hidden // heads,
        "ffn": ffn or (whole(fields, "intermediate_size") if kind else 4 * hidden),
        "vocab": whole(fields, "vocab_size"),
        "tied": flag(fields, "tie_word_embeddings"),
    }
    # Norms and biases of another kind are not told apart.
    result |= {"layer_norms": 0} if kind is None else parts_of_kind(fields, kind)
    result |= windows(fields, layers, label, positions_of(fields))
    if "recurrent" in result:
        result |= recurrent_layers(fields, label, layers)
    mixture = expert_sizes(fields, layers)
    sizes = [mixture.get(name, 0) for name in ("expert_ffn", "active_experts", "experts")]
    # Whether the usual names gave all of it.
    if kind or (all(sizes) and sizes[1] <= sizes[2] and mixture["dense_layers"] < layers):
        result |= mixture
    result |= latent_sizes(fields)
    if label in ("gemma3n_text", "gemma4_text"):
        result |= gemma_extras(fields, label, result)
    return result


def parts_of_kind(fields: Fields, parts: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a kind's modules: those that it always has, and those that its config says."""
    said = {size: field for size, field in parts.items() if isinstance(field, str)}
    said.pop("recurrent", None)
    read = {size: (whole if size in _STATE else flag)(fields, said[size]) for size in said}
    return {**parts, **read}


def whole(fields: Fields, field: str, least: int = 1) -> int:
    """A whole number that must be there."""
    value = fields.get(field)
    if value is None:
        raise InputError(f"the target's config has no field '{field}'")
    if not is_whole(value, least):
        raise InputError(
            f"the field '{field}' of the target's config must be a whole number from {least} to"
            f" {MOST} (is {shown(value)})"
        )
    return value


def count(fields: Fields, field: str) -> int:
    """A whole number; 0 where the field is absent or null."""
    return 0 if fields.get(field) is None else whole(fields, field, 0)


def first_of(fields: Fields, names: tuple[str, ...]) -> int:
    """The first of these fields that is above 0; 0 without any."""
    return next((value for name in names if (value := count(fields, name))), 0)


def flag(fields: Fields, field: str) -> bool:
    """True or false; false where the field is absent or null."""
    value = fields.get(field)
    if value is not None and not isinstance(value, bool):
        raise InputError(f"the field '{field}' of the target's config must be true or false")
    return bool(value)


def listed(fields: Fields, field: str, kind: type) -> list[Any]:
    """The values of a list of one type; empty where the field is something else."""
    values = fields.get(field)
    same = isinstance(values, (list, tuple)) and all(isinstance(value, kind) for value in values)
    return list(values) if same and values else []


def with_usual_names(fields: Fields, label: str) -> Fields:
    """The fields with those that only this kind calls otherwise, or gives in another form."""
    if label == "llama4_text":
        # Windows that start anew, and experts in every so many layers, with one that all pass.
        layers = whole(fields, "num_hidden_layers")
        step = count(fields, "interleave_moe_layer_step")
        sparse = listed(fields, "moe_layers", int) or range(step - 1, layers, step or 1)
        expert = whole(fields, "intermediate_size")
        return {
            **fields,
            "sliding_window": fields.get("attention_chunk_size"),
            "intermediate_size": whole(fields, "intermediate_size_mlp"),
            "moe_intermediate_size": expert,
            "shared_expert_intermediate_size": expert,
            "mlp_only_layers": [i for i in range(layers) if i not in sparse],
        }
    if label == "lfm2" and flag(fields, "block_auto_adjust_ff_dim"):
        step, factor = whole(fields, "block_multiple_of"), fields.get("block_ffn_dim_multiplier")
        factor = factor if isinstance(factor, (int, float)) else 1.0
        width = int(factor * int(2 * whole(fields, "intermediate_size") / 3))
        return {**fields, "intermediate_size": step * -(-width // step)}
    if label == "granitemoehybrid" and not count(fields, "num_local_experts"):
        return {**fields, "intermediate_size": fields.get("shared_intermediate_size")}
    if label == "nemotron_h":
        types = block_types(fields)
        fields = {**fields, "layer_types": types, "num_hidden_layers": len(types)}
        if "moe" not in types:
            return {**fields, **dict.fromkeys(_EXPERTS)}
        if fields.get("moe_latent_size"):
            raise InputError("experts over a latent vector ('moe_latent_size') are not supported")
    widths = listed(fields, "intermediate_size", int)
    if label == "gemma3n_text" and widths:
        return {**fields, "intermediate_size": widths[0], "ffn_widths": widths}
    return fields


def block_types(fields: Fields) -> list[str]:
    """What each layer is; empty where all are alike."""
    return listed(fields, "layer_types", str) or listed(fields, "layers_block_type", str)


def recurrent_layers(fields: Fields, label: str, layers: int) -> dict[str, Any]:
    """How many layers keep a state, and how many have no attention or FFN."""
    biased = next((name for name in _PROJECTION_BIASES if flag(fields, name)), None)
    if biased is not None:
        raise InputError(f"recurrent layers with biased projections ('{biased}') are not supported")
    if label == "falcon_h1":
        return {"recurrent_layers": layers}
    types = block_types(fields)
    odd = next((kind for kind in types if kind not in _BLOCKS), None)
    if odd is not None:
        raise InputError(f"a layer of the kind {shown(odd)} is not supported")
    attending = types.count("full_attention")
    ffns = types.count("mlp") + types.count("moe")
    recurrent = layers - attending - ffns
    sizes = {} if recurrent else dict(_NO_STATE)  # as in the default of LFM2
    if label == "nemotron_h":
        sizes["ffnless_layers"] = layers - ffns
    return sizes | {"recurrent_layers": recurrent, "keyless_layers": layers - attending}


def gemma_extras(fields: Fields, label: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Shared keys, two shapes of attention and inputs of each layer, of Gemma 3n and 4."""
    hidden, layers, ffn = sizes["hidden"], sizes["layers"], sizes["ffn"]
    shared = min(count(fields, "num_kv_shared_layers"), layers - 1)
    width = count(fields, "hidden_size_per_layer_input")
    other = layers * (3 * hidden * width + hidden) + width if width else 0
    result: dict[str, Any] = {
        "shared_kv_layers": shared,
        "shared_full_layers": block_types(fields)[layers - shared :].count("full_attention"),
        "lookup_weights": count(fields, "vocab_size_per_layer_input") * layers * width,
    }
    if label == "gemma4_text":
        if flag(fields, "use_double_wide_mlp"):
            other += shared * 3 * hidden * ffn
        if flag(fields, "enable_moe_block"):
            other += layers * hidden
            result |= {  # beside the FFN of the same layer, with a scale each and three more norms
                "experts": whole(fields, "num_experts"),
                "active_experts": whole(fields, "top_k_experts"),
                "expert_ffn": whole(fields, "moe_intermediate_size"),
                "shared_ffn": ffn,
                "router_bias": True,
                "layer_norms": 7,
            }
        # The attention of layers that read the whole context: fields, or overrides by layer.
        overrides = fields.get("per_layer_config") or {}
        names = {"global_head_dim": "head_dim", "num_global_key_value_heads": "num_key_value_heads"}
        one, first = fields, next(iter(overrides.values()), None) if overrides else None
        if isinstance(first, Mapping):
            one = {name: first.get(other_name) for name, other_name in names.items()}
        head_dim, kv_heads = count(one, "global_head_dim"), sizes["kv_heads"]
        if one_projection := flag(fields, "attention_k_eq_v"):
            kv_heads = count(one, "num_global_key_value_heads") or kv_heads
        result |= {
            "full_head_dim": 0 if head_dim == sizes["head_dim"] else head_dim,
            "full_kv_heads": 0 if kv_heads == sizes["kv_heads"] else kv_heads,
            "full_key_is_value": one_projection,
        }
    else:
        widths = fields.get("ffn_widths") or [ffn] * layers
        other += 3 * hidden * (sum(widths) - layers * ffn)
        streams, rank = whole(fields, "altup_num_inputs"), whole(fields, "laurel_rank")
        other += layers * (2 * hidden * rank + (3 + streams) * hidden + streams**2 + streams**3)
        other += 2 * (streams - 1) * hidden**2
    return result | {"other_weights": other}


def windows(fields: Fields, layers: int, label: str, positions: int | None) -> dict[str, Any]:
    """`sliding_window` and `full_layers`; none where the window covers all positions."""
    if fields.get("sliding_window") is None or fields.get("use_sliding_window") is False:
        return {}
    window, types = whole(fields, "sliding_window"), block_types(fields)
    full = sum(kind not in _WINDOWED for kind in types)
    whole_text = positions is not None and window >= positions and label != "gemma4_text"
    if full == layers or whole_text:
        return {}
    return {"sliding_window": window, "full_layers": full, "chunked": label == "llama4_text"}


def expert_sizes(fields: Fields, layers: int) -> dict[str, Any]:
    """A mixture of experts; where the config has none, no parts of one."""
    experts = first_of(fields, _EXPERTS)
    if not experts or "enable_moe_block" in fields:  # Gemma 4's: `gemma_extras` reads them
        return {"router_bias": False, "shared_gate": False}
    width = first_of(fields, _WIDTH)
    shared = first_of(fields, _SHARED) or width * count(fields, "n_shared_experts")
    if types := listed(fields, "mlp_layer_types", str):
        dense = types.count("dense")
    elif first := first_of(fields, ("first_k_dense_replace", "num_dense_layers")):
        dense = min(first, layers)
    elif "moe" in (blocks := block_types(fields)):
        dense = blocks.count("mlp")
    else:
        step = count(fields, "decoder_sparse_step") or 1
        plain = listed(fields, "mlp_only_layers", int)
        dense = sum(i in plain or (i + 1) % step != 0 for i in range(layers))
    return {
        "experts": experts,
        "active_experts": first_of(fields, _ACTIVE),
        "expert_ffn": width,
        "shared_ffn": shared,
        "dense_layers": dense,
    }


def latent_sizes(fields: Fields) -> dict[str, int]:
    """Latent attention, and the indexer of some; nothing where the config has no latents."""
    if not count(fields, "kv_lora_rank"):
        return {}
    sizes = {
        "head_dim": whole(fields, "qk_nope_head_dim") + whole(fields, "qk_rope_head_dim"),
        "query_rank": count(fields, "q_lora_rank"),
        "latent_rank": whole(fields, "kv_lora_rank"),
        "rope_dim": whole(fields, "qk_rope_head_dim"),
        "value_dim": whole(fields, "v_head_dim"),
    }
    if fields.get("index_topk") is None:
        return sizes
    names = {"index_heads": "index_n_heads", "index_dim": "index_head_dim"}
    types = listed(fields, "indexer_types", str)
    return sizes | {
        **{size: whole(fields, field) for size, field in names.items()},
        "index_topk": whole(fields, "index_topk"),
        "index_layers": types.count("full") if types else whole(fields, "num_hidden_layers"),
    }
