"""Parts of each kind of Hugging Face models beside its config, and readers of fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from costmodel.errors import InputError, shown
from costmodel.fields import MOST, is_whole

Fields = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelKind:
    """Parts of a kind's modules that no field of its config says.

    bias       attention projections with biases: none, `config` (query, key, value and output,
               where `attention_bias` says so), `config_qkv` (without output), or always `qkv`
    norms      norms over the hidden width in one layer
    qk_norm    queries and keys are normalised per head: never, always, or by a field
    router_bias, expert_bias  biases of the router, of the experts
    recurrent  layers with a state; `gated`: queries come with a gate
    """

    bias: Literal["", "config", "config_qkv", "qkv"] = "config"
    norms: int = 2
    qk_norm: bool | str = False
    sinks: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    recurrent: Literal["", "gated_delta", "kimi_delta", "mamba2", "short_conv"] = ""
    gated: bool = False


_DELTA = ModelKind(qk_norm=True, recurrent="gated_delta", gated=True)
_GEMMA = ModelKind(norms=4, qk_norm=True)
KINDS = {
    "llama": ModelKind(),
    "mistral": ModelKind(bias=""),
    "ministral": ModelKind(bias=""),
    "mixtral": ModelKind(bias=""),
    "qwen2": ModelKind(bias="qkv"),
    "qwen3": ModelKind(qk_norm=True),
    "qwen3_moe": ModelKind(qk_norm=True),
    "gemma": ModelKind(),
    "gemma2": ModelKind(norms=4),
    "gemma3_text": _GEMMA,
    "phi3": ModelKind(bias=""),
    "smollm3": ModelKind(),
    "glm": ModelKind(bias="config_qkv"),
    "glm4": ModelKind(bias="config_qkv", norms=4),
    "glm4_moe": ModelKind(bias="config_qkv", qk_norm="use_qk_norm", router_bias=True),
    "gpt_oss": ModelKind(sinks=True, router_bias=True, expert_bias=True),
    "deepseek_v2": ModelKind(),
    "deepseek_v3": ModelKind(router_bias=True),
    "glm4_moe_lite": ModelKind(router_bias=True),
    "deepseek_v32": ModelKind(router_bias=True),
    "glm_moe_dsa": ModelKind(router_bias=True),
    "kimi_linear": ModelKind(router_bias=True, recurrent="kimi_delta"),
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "qwen3_next": _DELTA,
    "falcon_h1": ModelKind(recurrent="mamba2"),
    "nemotron_h": ModelKind(bias="", norms=1, recurrent="mamba2", router_bias=True),
    "granitemoehybrid": ModelKind(recurrent="mamba2"),
    "bamba": ModelKind(recurrent="mamba2"),
    "lfm2": ModelKind(bias="", qk_norm=True, recurrent="short_conv"),
    "lfm2_moe": ModelKind(bias="", qk_norm=True, recurrent="short_conv", router_bias=True),
    "gemma3n_text": _GEMMA,
    "gemma4_text": _GEMMA,
    "llama4_text": ModelKind(),
    "gpt_neox": ModelKind(),
}


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
