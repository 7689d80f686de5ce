"""The HTML page of a benchmark result: verdicts, tables, two pictures, and what it was run on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lab.bench.analysis.ratios import Ratio
from lab.bench.analysis.summary import ResultFigures
from lab.bench.record import PLAIN, Arm, Result
from lab.bench.report.drawing import Picture, finish, new_plot, shown, slug
from lab.bench.report.html import draw, render, save_page
from lab.bench.report.tables import all_tables
from profiler.report.drawing import GRAY, tree_size_axis

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


if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    "bastion": "#e4572e",
    "chain": "#3a86c8",
    "fixed": "#4c9f70",
    "beam": "#9b6bd3",
    "static-tree": "#b07d62",
    "dynatree": "#c79a00",
}
INTERVALS = "Bars are 95 % bootstrap intervals over prompts; without a bar there are too few."
TIMES = "times as fast as plain decoding"


def pictures(figures: ResultFigures) -> list[Picture]:
    """The speed of all arms, and the sweep of each drafter (figure 4 of the BASTION paper)."""
    arms = [arm for arm in figures.result.arms if arm.name != PLAIN]
    speed = Picture(
        name="speedups",
        title="Speed of all arms",
        caption="Tokens per second from the first token on, over those of plain decoding on the "
        f"same prompts. {INTERVALS}",
        draw=partial(_draw_arms, figures, arms) if arms else None,
        missing="" if arms else "only plain decoding was run; add arms with --policy",
    )
    sweeps = [
        Picture(
            name=f"sweep-{number}-{slug(drafter)}",
            title=f"Speed against tree size with {drafter}",
            caption="Line: trees of a fixed number of nodes, 0 being plain decoding. Stars: other "
            "policies, at the mean of the nodes they verified. Dashed: the best size of each "
            f"prompt set, picked knowing the outcome. {INTERVALS}",
            draw=partial(_draw_sweep, figures, drafter),
        )
        for number, drafter in enumerate(figures.hindsight, start=1)
    ]
    missing = "add --study sweep for fixed tree sizes"
    return [speed, *(sweeps or [Picture(name="sweep", title="Tree sizes", missing=missing)])]


def _draw_arms(figures: ResultFigures, arms: Sequence[Arm]) -> Figure:
    plot, axes = new_plot(0.8 + 0.26 * max(len(arms), 3))
    axes.set_ylim(len(arms) - 0.4, -0.6)
    axes.grid(False, axis="y")
    axes.set_yticks(range(len(arms)), [shown(arm.name) for arm in arms])
    axes.axvline(1.0, color=GRAY, linestyle=":", linewidth=1)
    for row, arm in enumerate(arms):
        ratio = figures.of(arm.name).over_plain
        if ratio is not None:
            axes.errorbar(ratio.pooled, row, xerr=_bars(ratio), fmt="o", markersize=5,
                          color=colour_of(arm.policy), elinewidth=1.6, capsize=2)  # fmt: skip
    axes.set_xlim(left=min(0.0, axes.get_xlim()[0]))
    return finish(plot, axes, (TIMES, ""))


def _draw_sweep(figures: ResultFigures, drafter: str) -> Figure:
    plot, axes = new_plot()
    sweep = figures.hindsight[drafter]
    points = [(size.nodes, ratio) for size in sweep.sizes
              if (ratio := figures.of(size.arm).over_plain) is not None]  # fmt: skip
    axes.plot([nodes for nodes, _ in points], [ratio.pooled for _, ratio in points], "o-",
              markersize=4, color=COLOURS["fixed"], label="fixed size")  # fmt: skip
    for nodes, ratio in points:
        if nodes > 0:  # plain decoding is 1 by definition
            axes.errorbar(nodes, ratio.pooled, yerr=_bars(ratio), color=COLOURS["fixed"],
                          elinewidth=1.2)  # fmt: skip
    best = sweep.set_tokens_per_s / sweep.sizes[0].tokens_per_s
    axes.axhline(best, color="#c79a00", linestyle="--", label="best size per set, in hindsight")
    for arm in figures.speculating:
        one = figures.of(arm.name)
        if arm.drafter != drafter or arm.nodes is not None or arm.variant or not one.over_plain:
            continue
        axes.errorbar(one.nodes_mean, one.over_plain.pooled, yerr=_bars(one.over_plain), fmt="*",
                      markersize=11, color=colour_of(arm.policy), elinewidth=1.2, zorder=3,
                      label=shown(arm.policy))  # fmt: skip
    tree_size_axis(axes, [size.nodes for size in sweep.sizes])
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    return finish(plot, axes, ("nodes of the draft tree", TIMES), columns=2)


def _bars(ratio: Ratio) -> list[list[float]] | None:
    """Distances to the ends of the interval, as matplotlib's error bars; None without one."""
    if ratio.low is None or ratio.high is None:
        return None
    # A skewed interval of few prompts may lie on one side of the pooled ratio.
    return [[max(ratio.pooled - ratio.low, 0.0)], [max(ratio.high - ratio.pooled, 0.0)]]


def colour_of(policy: str) -> str:
    """The colour of a policy's family; gray for plain decoding and peers."""
    return COLOURS.get(re.split(r"[:\[+]", policy)[0], GRAY)
