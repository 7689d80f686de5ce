"""A Hugging Face config as fields: from the hub, its local cache, a class or a file.

No default is filled in here: a config comes from its class in transformers, which has them
(`decoder.configs`), or from a known target, whose fields targets.yaml lists.
"""

from __future__ import annotations

import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from costmodel.errors import InputError, shown
from costmodel.io import NotJson, parse_json, read_bytes

Fields = Mapping[str, Any]
TIMEOUT_S = 10.0
MAX_CONFIG_BYTES = 4_000_000
_HINT = "Check the name and the network, or give the path of its config.json"
# Kinds whose sizes are those of another, under the same names.
SAME = {"gemma4_unified_text": "gemma4_text", "kimi_k2": "deepseek_v3"}
# Fields that are read of any kind, and mean nothing where a class does not declare them.
OPTIONAL = frozenset(
    (
        "attention_chunk_size", "decoder_sparse_step", "first_k_dense_replace", "index_topk",
        "kv_lora_rank", "layer_types", "mlp_layer_types", "mlp_only_layers", "moe_layers",
        "moe_intermediate_size", "moe_num_experts", "multi_query", "n_routed_experts",
        "n_shared_experts", "num_dense_layers", "num_experts", "num_key_value_heads",
        "num_local_experts", "shared_expert_intermediate_size", "shared_intermediate_size",
        "sliding_window", "use_sliding_window",
    )
)  # fmt: skip


def text_fields(config: Any) -> Fields:
    """The fields of a config; of a multimodal model's, those of its text part."""
    fields, text = config_fields(config), getattr(config, "text_config", None)
    if isinstance(config, Mapping):
        text = config.get("text_config")
    if text:
        top = fields.get("tie_word_embeddings")
        fields = {**config_fields(text)}
        fields["tie_word_embeddings"] = fields.get("tie_word_embeddings") if top is None else top
    label = str(fields.get("model_type"))
    return {**fields, "model_type": SAME[label]} if label in SAME else fields


def config_fields(config: Any) -> Fields:
    """The fields of a Hugging Face config: of an object with `to_dict`, or the mapping itself.

    An object has them by their usual names, whatever its class calls them.
    """
    if isinstance(config, Mapping):
        return config
    to_dict = getattr(config, "to_dict", None)
    if not callable(to_dict):
        raise InputError(
            "a target config must be a mapping or a transformers config,"
            f" not {type(config).__name__}"
        )
    usual_names: Mapping[str, str] = getattr(config, "attribute_map", None) or {}
    fields: dict[str, Any] = to_dict()
    fields |= {usual: getattr(config, usual, None) for usual in usual_names}
    kind: Any = type(config)
    declared = {*usual_names, *usual_names.values(), *_own_names(kind)}
    return {name: fields[name] for name in fields if name in declared or name not in OPTIONAL}


@cache
def _own_names(kind: type) -> frozenset[str]:
    """The attributes that a class of configs has or sets by itself."""
    try:
        own = vars(kind())
    except Exception:  # few classes have fields without a default
        own = getattr(kind, "__dataclass_fields__", {})
    return frozenset((*dir(kind), *own))


def positions_of(fields: Fields) -> int | None:
    """The longest text that a target's positions reach, scaled ones included; None: not said.

    As vLLM reads it: `yarn` multiplies the original positions, `linear` and `dynamic` those of the
    config; of `longrope` and `llama3` (and of Gemma 3) the config says the scaled ones.
    """
    longest: object = fields.get("max_position_embeddings")
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if isinstance(rope, Mapping) and isinstance(rope.get("full_attention"), Mapping):
        rope = rope["full_attention"]
    rope = rope if isinstance(rope, Mapping) else {}
    kind, factor = rope.get("rope_type") or rope.get("type"), rope.get("factor")
    if kind == "yarn":
        longest = rope.get("original_max_position_embeddings") or longest
    if longest is None:
        return None
    if not isinstance(longest, int) or isinstance(longest, bool) or longest < 1:
        raise InputError(
            "the field 'max_position_embeddings' of the target's config must be a whole number"
            f" above 0 (is {shown(longest)})"
        )
    extended = "gemma3" in str(fields.get("model_type"))
    if kind not in ("linear", "dynamic", "yarn") or factor is None or extended:
        return longest
    if type(factor) not in (int, float) or not 1 <= factor <= 1e6:
        raise InputError(f"the factor of the target's rope scaling is no number ({shown(factor)})")
    return int(longest * factor)


def is_hub_id(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", name) is not None


@cache
def hub_config(name: str) -> Any:
    """The config.json of the model `owner/model`, parsed.

    It is taken from the hub's cache on this machine where it is there; else it is fetched (a few
    kilobytes, no weights), which needs a network, and for a gated model a token. Raises
    InputError that says which of them is missing.
    """
    from huggingface_hub import constants, get_token, try_to_load_from_cache

    cached = try_to_load_from_cache(name, "config.json")
    problem = f"'{name}' is no folder and no known target"
    endpoint = os.environ.get("HF_ENDPOINT", constants.ENDPOINT).rstrip("/")
    try:
        if isinstance(cached, str):
            raw = read_bytes(Path(cached), InputError)
        elif constants.HF_HUB_OFFLINE:
            raise InputError(f"{problem}, and HF_HUB_OFFLINE forbids to ask the hub", hint=_HINT)
        else:
            request = urllib.request.Request(f"{endpoint}/{name}/resolve/main/config.json")
            if token := get_token():
                request.add_unredirected_header("Authorization", f"Bearer {token}")
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                raw = response.read(MAX_CONFIG_BYTES + 1)
    except urllib.error.HTTPError as failure:
        raise InputError(
            f"{problem}, and the hub does not give its config (HTTP {failure.code}: it has none,"
            " or the model is gated)",
            hint="Check the name, log in with `hf auth login`, or give the path of its config.json",
        ) from None
    except (OSError, ValueError) as failure:
        reason = getattr(failure, "reason", failure)
        raise InputError(
            f"{problem}, and the hub cannot be asked for its config without a network ({reason})",
            hint=_HINT,
        ) from None
    if len(raw) > MAX_CONFIG_BYTES:
        raise InputError(f"the config.json of {name} is larger than a config can be")
    try:
        return parse_json(raw, finite=False)
    except NotJson as failure:
        raise InputError(f"the config.json of {name} is not JSON: {failure}") from None
