"""The kinds of Hugging Face models whose cost is known, and readers of a config's fields."""

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
    first_dense  layers of `first` where the config does not say it
    shared     field with the width of an FFN that every token passes beside its experts
    router_bias, expert_bias, latent  of the router, of the experts; latent attention
    recurrent  layers with a state; `gated`: queries come with a gate
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
    first_dense: int = 0
    shared: str = ""
    recurrent: Literal["", "gated_delta", "kimi_delta", "mamba2", "short_conv"] = ""
    gated: bool = False


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
    "glm4_moe_lite": ModelKind(
        experts="moe_intermediate_size", dense="first", first_dense=1, router_bias=True,
        latent=True,
    ),
    "deepseek_v32": ModelKind(
        experts="moe_intermediate_size", dense="first", first_dense=3, router_bias=True,
        latent=True,
    ),
    "glm_moe_dsa": ModelKind(
        experts="moe_intermediate_size", dense="first", first_dense=3, router_bias=True,
        latent=True,
    ),
    "kimi_linear": ModelKind(
        experts="moe_intermediate_size", dense="first", first_dense=1, router_bias=True,
        latent=True, recurrent="kimi_delta",
    ),
    "qwen3_5_text": ModelKind(head_dim=256, qk_norm=True, recurrent="gated_delta", gated=True),
    "qwen3_5_moe_text": ModelKind(
        head_dim=256, qk_norm=True, recurrent="gated_delta", gated=True,
        experts="moe_intermediate_size", shared="shared_expert_intermediate_size",
    ),
    "qwen3_next": ModelKind(
        head_dim=256, qk_norm=True, recurrent="gated_delta", gated=True, dense="step",
        experts="moe_intermediate_size", shared="shared_expert_intermediate_size",
    ),
    "falcon_h1": ModelKind(recurrent="mamba2"),
    "nemotron_h": ModelKind(
        bias="", head_dim=128, norms=1, recurrent="mamba2", router_bias=True,
        experts="moe_intermediate_size", shared="moe_shared_expert_intermediate_size",
    ),
    "granitemoehybrid": ModelKind(
        recurrent="mamba2", experts="intermediate_size", shared="shared_intermediate_size"
    ),
    "bamba": ModelKind(recurrent="mamba2"),
    "lfm2": ModelKind(bias="", tied=True, qk_norm=True, recurrent="short_conv"),
    "lfm2_moe": ModelKind(
        bias="", tied=True, qk_norm=True, recurrent="short_conv", dense="first", first_dense=2,
        experts="moe_intermediate_size", router_bias=True,
    ),
    "gemma3n_text": ModelKind(
        head_dim=256, tied=True, norms=4, qk_norm=True, window="config", pattern=5
    ),
    "gemma4_text": ModelKind(
        head_dim=256, tied=True, norms=4, qk_norm=True, window="config", pattern=6
    ),
    "llama4_text": ModelKind(
        head_dim=128, window="config", pattern=4, dense="step", experts="moe_intermediate_size",
        shared="moe_intermediate_size",
    ),
    "gpt_neox": ModelKind(),
}  # fmt: skip


def whole(fields: Fields, field: str, default: int | None = None, least: int = 1) -> int:
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


def flag(fields: Fields, field: str, default: bool) -> bool:
    value = fields.get(field)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InputError(f"the field '{field}' of the target's config must be true or false")
    return value
