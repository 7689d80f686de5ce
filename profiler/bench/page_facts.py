"""What a benchmark was run with and on, for its page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from profiler.bench import markup
from profiler.bench.record import Arm, Model, Result


def settings_facts(result: Result) -> str:
    """Settings, prompt files with their hashes, and how each arm was made."""
    settings = result.settings
    plain = {
        field.name.replace("_", " "): _value(getattr(settings, field.name))
        for field in fields(settings)
        if field.name != "files"
    }
    files = {
        f"prompts: {one.name}": f"{one.prompts} in the file, sha256 {one.sha256}"
        for one in settings.files
    }
    arms = {arm.name: _arm(arm) for arm in result.arms}
    made = markup.folded("How each arm was made", markup.facts("made", arms))
    return markup.facts("settings", plain | files) + made


def model_facts(result: Result) -> str:
    """Target, drafters and the profile with its hash."""
    values = {"target": _model(result.target)}
    values |= {f"drafter {number}": _model(one) for number, one in enumerate(result.drafters, 1)}
    if result.profile is None:
        values["profile"] = "none was read"
    else:
        profile = result.profile
        values["profile"] = profile.line
        values["profile's sha256"] = profile.sha256
        values["profile's making"] = f"{profile.kind}, {profile.created_utc}"
    return markup.facts("models", values)


def environment_facts(result: Result) -> str:
    """The machine, its state and versions; what is not known says why."""
    environment = result.environment
    values = {
        "created": environment.created_utc,
        "device": environment.device,
        "threads": _value(environment.threads),
        "instruction set": _value(environment.instruction_set),
        "busy beside": ", ".join(environment.busy) or "nothing that was seen",
    }
    values |= dict(_field(name, value) for name, value in environment.fields.items())
    values |= {f"{name} (not there)": why for name, why in environment.absent.items()}
    return markup.facts("environment", values)


def _field(name: str, value: str | int | float | bool | None) -> tuple[str, str]:
    """A field's name and value, large units in place of bytes and hertz."""
    for suffix, unit, size in (("_bytes", "GiB", 2.0**30), ("_hz", "GHz", 1e9)):
        if name.endswith(suffix) and isinstance(value, int | float):
            return name.removesuffix(suffix).replace("_", " "), f"{value / size:.2f} {unit}"
    return name.replace("_", " "), _value(value)


def _model(model: Model) -> str:
    source = f", from {model.source}" if model.source else ""
    parts = {
        "blocks of ": model.block_size,
        "without ": ", ".join(model.without),
        "updated by ": model.updates,
        "the weights of ": model.same_as,
    }
    told = "".join(f", {what}{value}" for what, value in parts.items() if value)
    return f"{model.name}, architecture {model.hash}, {model.weights} weights{source}{told}"


def _arm(arm: Arm) -> str:
    parts: Mapping[str, Any] = {
        "policy": arm.policy,
        "drafter": arm.drafter,
        "variant": arm.variant,
        "updates": arm.updates,
        "nodes": arm.nodes,
        "estimator": arm.estimator,
        "cost": arm.cost,
        **arm.options,
    }
    return "; ".join(f"{name}: {_value(value)}" for name, value in parts.items()
                     if value not in (None, ""))  # fmt: skip


def _value(value: object) -> str:
    """A value for people."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
