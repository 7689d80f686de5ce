"""The HTML page of a benchmark result: verdicts, tables, two pictures, and what it was run on."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from lab.bench.analysis.ratios import Ratio
from lab.bench.analysis.summary import ResultFigures
from lab.bench.record import Arm, Result
from lab.bench.report.pictures import pictures
from lab.bench.report.tables import all_tables
from profiler.report.html import draw, render, save_page

HOW = (
    "Every arm decoded the same prompts, taking turns prompt by prompt after a warm-up, on one "
    "clock; tokens are counted alike, up to the end token or the limit.",
    "Decoding alone runs from the first token to the last; end to end also holds the prefill, and "
    "behind the text the update of a drafter that learns.",
    "A ratio is all tokens over all seconds of an arm, over the same of the other arm on the same "
    "prompts. Intervals are 95 % bootstrap intervals over prompts (paired); a dash stands where "
    "there were too few.",
    "Tokens per verification: tokens kept for each forward of the target after the prefill, the "
    "bonus token counted, plain steps included.",
)
Facts = dict[str, str]


def write_page(result: Result, path: str | Path) -> None:
    """Write the page in one step. Raises InputError where it cannot be written."""
    save_page(path, page(result))


def page(result: Result) -> str:
    """The whole page."""
    figures = ResultFigures(result)
    return render(
        Path(__file__).with_name("bench.html"),
        title=f"rooftree bench: {result.target.name}",
        lead=heading(result),
        warnings=result.warnings,
        verdicts=verdicts(figures),
        tables=all_tables(figures),
        figures=draw(pictures(figures)),
        how=HOW,
        settings=settings_facts(result),
        arm_facts={arm.name: _arm(arm) for arm in result.arms},
        models=model_facts(result),
        environment=environment_facts(result),
    )


def heading(result: Result) -> str:
    """One line: target, machine, prompts and settings."""
    settings, machine = result.settings, result.environment
    threads = "" if machine.threads is None else f", {machine.threads} thread"
    threads += "s" if (machine.threads or 0) > 1 else ""
    repeats = f" x {settings.repeats}" if settings.repeats > 1 else ""
    texts = ", our arms writing plain decoding's text" if settings.same_text else ""
    texts += ", round by round in turn" if settings.by_round else ""
    return (
        f"{result.target.name} ({settings.dtype}, {settings.runtime}) on {machine.device}{threads}"
        f": {len(result.prompts)} prompts{repeats} of {', '.join(result.sets)}, up to "
        f"{settings.new_tokens} new tokens, T = {settings.temperature:g}{texts}"
    )


def verdicts(figures: ResultFigures) -> list[str]:
    """One sentence for each `bastion` arm: its speed over plain decoding and the best size."""
    lines = []
    for arm in figures.speculating:
        speed = figures.of(arm.name)
        if arm.policy != "bastion" or arm.variant or speed.over_plain is None:
            continue
        text = (
            f"{arm.name} decodes {speed.over_plain.pooled:.2f} times as fast as plain decoding"
            f"{_interval(speed.over_plain)}"
        )
        if arm.updates and speed.over_plain_end_to_end is not None:
            text += f", {speed.over_plain_end_to_end.pooled:.2f} times end to end with its updates"
        if speed.verification is not None:
            text += f", with {speed.verification.pooled:.2f} tokens per verification"
        sweep = figures.hindsight.get(arm.drafter or "")
        for one in () if sweep is None else sweep.against:
            if sweep is not None and one.arm == arm.name and one.single is not None:
                text += (
                    f", and {one.single.pooled:.2f} times as fast as {sweep.single_best}, the best "
                    f"single size in hindsight{_interval(one.single)}"
                )
        lines.append(text + ".")
    return lines


def _interval(ratio: Ratio) -> str:
    if ratio.low is None or ratio.high is None:
        return " (too few prompts for an interval)"
    return f" (95 % interval {ratio.low:.2f} to {ratio.high:.2f}, {ratio.prompts} prompts)"


def settings_facts(result: Result) -> Facts:
    """Settings, and prompt files with their hashes."""
    facts = _facts(result.settings, without="files")
    for file in result.settings.files:
        facts[f"prompts: {file.name}"] = f"{file.prompts} in the file, sha256 {file.sha256}"
    return facts


def model_facts(result: Result) -> Facts:
    """Target, drafters, engines, and the profile with its hash."""
    facts = {
        one.name if one is not result.target else "target": _listed(_facts(one))
        for one in (result.target, *result.drafters)
    }
    facts |= {f"engine {one.name}": _listed(_facts(one)) for one in result.engines}
    profile = result.profile
    return facts | {"profile": "none was read" if profile is None else _listed(_facts(profile))}


def environment_facts(result: Result) -> Facts:
    """The machine, its state and versions, and why some fields are absent."""
    environment = result.environment
    facts = _facts(environment, without="fields absent busy")
    facts["busy beside"] = ", ".join(environment.busy) or "nothing that was seen"
    facts |= {_words(name): _value(value) for name, value in environment.fields.items()}
    return facts | {f"{name} (not there)": why for name, why in environment.absent.items()}


def _arm(arm: Arm) -> str:
    return _listed(_facts(arm, without="name kind studies"))


def _facts(record: object, without: str = "") -> Facts:
    """The fields of a dataclass that hold something, as text."""
    names = [one.name for one in fields(record)]  # type: ignore[arg-type]
    values = {name: getattr(record, name) for name in names if name not in without.split()}
    return {
        _words(name): _value(value) for name, value in values.items() if value not in ("", (), {})
    }


def _listed(facts: Facts) -> str:
    return "; ".join(f"{name}: {value}" for name, value in facts.items() if value != "-")


def _words(name: str) -> str:
    return name.replace("_", " ")


def _value(value: object) -> str:
    """A value as text: a dash for None, yes or no, short floats."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return _listed({name: _value(one) for name, one in value.items()})
    if isinstance(value, (tuple, list)):
        return ", ".join(map(_value, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
