"""Targets that are known by name, so that a model can be sized or built without a hub."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from costmodel.architecture import ModelArchitecture
from costmodel.errors import InputError
from costmodel.files import input_yaml, shipped_directory

# Keys of targets.yaml that say how to build the model, beside the sizes.
_EXTRAS = ("kind", "positions", "rope_theta", "rotary_fraction", "llama3", "norm_epsilon")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TargetEntry:
    """One known target.

    `hf_config` holds what a Hugging Face config needs:
    `AutoConfig.for_model(**entry.hf_config)` builds it.
    """

    name: str
    architecture: ModelArchitecture
    hf_config: dict[str, Any]
    parameters: int


def load_targets(path: Path | None = None) -> dict[str, TargetEntry]:
    """All known targets by name, from the shipped file or `path`. Raises InputError."""
    if path is None:
        return dict(_shipped_targets())
    table = input_yaml(path)
    if not isinstance(table, Mapping) or not table:
        raise InputError(f"{path}: must map target names to their sizes")
    return {str(name): _entry(path, str(name), fields) for name, fields in table.items()}


@cache
def _shipped_targets() -> dict[str, TargetEntry]:
    return load_targets(shipped_directory() / "targets.yaml")


def find_target(name: str) -> TargetEntry:
    """The known target called `name`: in full, or its last part, upper or lower case.

    Raises InputError that lists near names where none or several match.
    """
    targets = _shipped_targets()
    if name in targets:
        return targets[name]
    wanted = name.strip().lower()
    matches = [
        entry
        for full, entry in targets.items()
        if wanted in (full.lower(), full.lower().rpartition("/")[2])
    ]
    if len(matches) == 1:
        return matches[0]
    if matches:
        names = ", ".join(entry.name for entry in matches)
        raise InputError(f"the target name '{name}' is ambiguous", hint=f"Use one of: {names}")
    raise InputError(
        f"no known target is called '{name}'",
        hint=f"Near names: {', '.join(_near(wanted, list(targets)))}; or name a model folder",
    )


def _near(wanted: str, names: list[str]) -> list[str]:
    last_parts = {name.lower().rpartition("/")[2]: name for name in names}
    close = difflib.get_close_matches(wanted.rpartition("/")[2], last_parts, n=3, cutoff=0.4)
    inside = [part for part in last_parts if wanted and wanted in part and part not in close]
    found = [last_parts[part] for part in close + inside]
    return found[:5] or sorted(names)[:5]


def _entry(path: Path, name: str, fields: Any) -> TargetEntry:
    if not isinstance(fields, Mapping):
        raise InputError(f"{path}: {name}: must be a mapping of sizes")
    sizes = {key: value for key, value in fields.items() if key not in _EXTRAS}
    parameters = sizes.pop("parameters", None)
    try:
        hf_config = _hf_config(fields)
        architecture = ModelArchitecture.from_hf_config(hf_config, name=name)
        for key, value in sizes.items():
            if getattr(architecture, key, None) != value:
                raise InputError(f"{key} does not fit a target of kind '{fields['kind']}'")
    except KeyError as failure:
        raise InputError(f"{path}: {name}: the field {failure} is missing") from None
    except InputError as failure:
        raise InputError(f"{path}: {name}: {failure.problem}") from None
    if parameters != architecture.parameters:
        raise InputError(
            f"{path}: {name}: parameters is {parameters!r}, but the sizes give"
            f" {architecture.parameters}"
        )
    return TargetEntry(
        name=name, architecture=architecture, hf_config=hf_config, parameters=parameters
    )


def _hf_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    kind = fields["kind"]
    config: dict[str, Any] = {
        "model_type": kind,
        "num_hidden_layers": fields["layers"],
        "hidden_size": fields["hidden"],
        "num_attention_heads": fields["heads"],
        "intermediate_size": fields["ffn"],
        "vocab_size": fields["vocab"],
        "tie_word_embeddings": fields["tied"],
        "max_position_embeddings": fields["positions"],
        "rope_parameters": _rope(fields),
    }
    if kind == "gpt_neox":
        config["use_parallel_residual"] = True
        return config
    config["num_key_value_heads"] = fields["kv_heads"]
    config["head_dim"] = fields["head_dim"]
    config["rms_norm_eps"] = fields.get("norm_epsilon", 1e-6)
    if kind == "qwen3_moe":
        config["num_experts"] = fields["experts"]
        config["num_experts_per_tok"] = fields["active_experts"]
        config["moe_intermediate_size"] = fields["expert_ffn"]
        config["norm_topk_prob"] = True
    return config


def _rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(fields["rope_theta"])}
    if "rotary_fraction" in fields:
        rope["partial_rotary_factor"] = fields["rotary_fraction"]
    if "llama3" in fields:
        rope |= {
            "rope_type": "llama3",
            "factor": float(fields["llama3"]),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    return rope
