"""The HTML page of a benchmark result, and its pictures as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from costmodel.errors import InputError
from lab.bench.analysis.ratios import Ratio
from lab.bench.analysis.summary import ResultFigures
from lab.bench.record import Result
from lab.bench.report.drafter_tables import drafter_tables
from lab.bench.report.engine_table import engine_tables
from lab.bench.report.facts import (
    arm_facts,
    environment_facts,
    heading,
    model_facts,
    settings_facts,
)
from lab.bench.report.speed_pictures import speed_pictures, study_pictures, sweep_pictures
from lab.bench.report.tables import (
    accuracy_table,
    arms_table,
    depths_table,
    more_table,
    sets_table,
    sweep_tables,
)
from lab.bench.report.time_pictures import time_pictures
from lab.bench.report.tree_pictures import choice_pictures, length_pictures, score_pictures
from profiler.report.drawing import Picture, save_figure, set_title
from profiler.report.html import Figures, Table, draw, render, save_page

HOW = (
    "Every arm decoded the same prompts, taking turns prompt by prompt after a warm-up, on one "
    "clock; tokens are counted alike, up to the end token or the limit.",
    "Decoding alone runs from the first token to the last; end to end also holds the prefill, and "
    "behind the text the update of a drafter that learns.",
    "A ratio is all tokens over all seconds of an arm, over the same of the other arm on the same "
    "prompts. Intervals are 95 % bootstrap intervals over prompts (paired); a dash stands where "
    "there were too few.",
    "Tokens per verification: tokens kept for each forward of the target after the prefill, the "
    "bonus token counted unless said otherwise, plain steps included.",
)


def write_page(result: Result, path: str | Path) -> None:
    """Write the page in one step. Raises InputError where it cannot be written."""
    save_page(path, page(result))


def page(result: Result) -> str:
    """The whole page."""
    figures = ResultFigures(result)
    return render(
        "bench.html",
        title=f"rooftree bench: {result.target.name}",
        lead=heading(result),
        made=f"{result.environment.created_utc}; {_profile_line(result)}",
        warnings=result.warnings,
        verdicts=verdicts(figures),
        arms=[arms_table(figures), *([sets_table(figures)] if len(result.sets) > 1 else [])],
        more=more_table(figures),
        drafters=[*engine_tables(result), *drafter_tables(result)],
        sections=_sections(figures),
        how=HOW,
        settings=settings_facts(result),
        arm_facts=arm_facts(result),
        models=model_facts(result),
        environment=environment_facts(result),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Section:
    """Pictures, and tables below them; a table with a title is folded away."""

    title: str
    figures: Figures
    tables: Sequence[Table]


def _sections(figures: ResultFigures) -> list[_Section]:
    accuracy = accuracy_table(figures)
    tables = {
        "Speed": sweep_tables(figures),
        "Acceptance": [depths_table(figures)],
        "Time": [accuracy] if accuracy.rows else [],
    }
    return [
        _Section(title=title, figures=draw(pictures), tables=tables.get(title, ()))
        for title, pictures in gallery(figures).items()
    ]


def verdicts(figures: ResultFigures) -> list[str]:
    """One sentence for each `bastion` arm: its speed over plain decoding and the best size."""
    lines = []
    for arm in figures.with_policy("bastion"):
        speed = figures.of(arm.name)
        if speed.over_plain is None:
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
        against = [] if sweep is None else [one for one in sweep.against if one.arm == arm.name]
        for one in against:
            if sweep is not None and one.single is not None:
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


def _profile_line(result: Result) -> str:
    if result.profile is None:
        return "no arm read a profile"
    return f"profile {result.profile.sha256[:12]} ({result.profile.kind})"


def write_plots(result: Result, folder: str | Path) -> list[Path]:
    """Draw every picture that the run has data for as `folder/<name>.png`, and return the paths.

    Raises InputError where the folder or a file cannot be written.
    """
    where = Path(folder)
    try:
        where.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot make the folder {where}: {error.strerror or error}",
            hint="Choose a folder you can write to for --plot.",
        ) from error
    written = []
    for pictures in gallery(ResultFigures(result)).values():
        for picture in pictures:
            if picture.draw is None:
                continue
            figure = picture.draw()
            set_title(figure, picture.title)
            written.append(save_figure(figure, where / f"{picture.name}.png"))
    return written


def gallery(figures: ResultFigures) -> dict[str, list[Picture]]:
    """The pictures by section of the page."""
    return {
        "Speed": [*speed_pictures(figures), *sweep_pictures(figures), *study_pictures(figures)],
        "Acceptance": [*length_pictures(figures), *score_pictures(figures)],
        "Chosen trees": choice_pictures(figures),
        "Time": time_pictures(figures),
    }
