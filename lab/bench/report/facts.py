"""Facts of a run for its page: settings, models, profile and machine."""

from __future__ import annotations

from dataclasses import fields

from lab.bench.record import Arm, EngineInfo, Model, Result

Facts = dict[str, str]


def heading(result: Result) -> str:
    """One line: target, machine, prompts and settings."""
    settings, machine = result.settings, result.environment
    count = len(result.prompts)
    threads = "" if machine.threads is None else f", {machine.threads} thread"
    threads += "s" if (machine.threads or 0) > 1 else ""
    repeats = f" x {settings.repeats}" if settings.repeats > 1 else ""
    texts = ", our arms writing plain decoding's text" if settings.same_text else ""
    texts += ", round by round in turn" if settings.by_round else ""
    return (
        f"{result.target.name} ({settings.dtype}, {settings.runtime}) on {machine.device}{threads}"
        f": {count} prompts{repeats} of {', '.join(result.sets)}, up to {settings.new_tokens} new "
        f"tokens, T = {settings.temperature:g}{texts}"
    )


def settings_facts(result: Result) -> Facts:
    """Settings, and prompt files with their hashes."""
    settings = result.settings
    facts = {
        _words(field.name): _value(getattr(settings, field.name))
        for field in fields(settings)
        if field.name != "files"
    }
    for file in settings.files:
        facts[f"prompts: {file.name}"] = f"{file.prompts} in the file, sha256 {file.sha256}"
    return facts


def arm_facts(result: Result) -> Facts:
    """One line for each arm: its policy, drafter, cost model and options."""
    return {arm.name: _arm(arm) for arm in result.arms}


def model_facts(result: Result) -> Facts:
    """Target, drafters, engines, and the profile with its hash."""
    facts = {"target": _model(result.target)}
    facts |= {f"drafter {number}": _model(one) for number, one in enumerate(result.drafters, 1)}
    facts |= {f"engine {engine.name}": _engine(engine) for engine in result.engines}
    profile = result.profile
    if profile is None:
        return facts | {"profile": "none was read"}
    return facts | {
        "profile": profile.line,
        "profile's sha256": profile.sha256,
        "profile's making": f"{profile.kind}, {profile.created_utc}",
    }


def environment_facts(result: Result) -> Facts:
    """The machine, its state and versions, and why some fields are absent."""
    environment = result.environment
    facts = {
        "created": environment.created_utc,
        "device": environment.device,
        "threads": _value(environment.threads),
        "instruction set": _value(environment.instruction_set),
        "busy beside": ", ".join(environment.busy) or "nothing that was seen",
    }
    facts |= dict(_field(name, value) for name, value in environment.fields.items())
    return facts | {f"{name} (not there)": why for name, why in environment.absent.items()}


def _field(name: str, value: str | int | float | bool | None) -> tuple[str, str]:
    """A field's name and value, bytes in GiB and hertz in GHz."""
    for suffix, unit, size in (("_bytes", "GiB", 2.0**30), ("_hz", "GHz", 1e9)):
        if name.endswith(suffix) and isinstance(value, int | float):
            return _words(name.removesuffix(suffix)), f"{value / size:.2f} {unit}"
    return _words(name), _value(value)


def _model(model: Model) -> str:
    source = f", from {model.source}" if model.source else ""
    parts = {
        "blocks of ": model.block_size,
        "without ": ", ".join(model.without),
        "updated by ": model.updates,
        "the weights of ": model.same_as,
    }
    details = "".join(f", {words}{value}" for words, value in parts.items() if value)
    return f"{model.name}, architecture {model.hash}, {model.weights} weights{source}{details}"


def _engine(engine: EngineInfo) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in engine.versions.items())
    model = f", from {engine.model}" if engine.model else ""
    options = "".join(f"; {name}: {_value(value)}" for name, value in engine.options.items())
    return f"{versions}; {engine.precision}{model}{options}"


def _arm(arm: Arm) -> str:
    parts = {
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


def _words(name: str) -> str:
    return name.replace("_", " ")


def _value(value: object) -> str:
    """A value as text: a dash for None, yes or no, short floats."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
