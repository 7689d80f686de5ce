"""A benchmark's result as one page of HTML: no network, no script, the numbers of the JSON."""

from __future__ import annotations

from pathlib import Path

from costmodel.errors import InputError, ProfileError
from costmodel.files import write_atomic
from profiler.bench import markup
from profiler.bench.analysis import Ratio
from profiler.bench.drawing import Picture
from profiler.bench.page_facts import environment_facts, model_facts, settings_facts
from profiler.bench.page_tables import (
    accuracy_table,
    arms_table,
    depth_table,
    drafter_tables,
    more_table,
    sets_table,
    sweep_tables,
)
from profiler.bench.plots import gallery
from profiler.bench.record import Result
from profiler.bench.svg import inline_svg
from profiler.bench.tables import heading
from profiler.bench.view import View

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
    try:
        write_atomic(Path(path), page(result))
    except ProfileError as failure:
        raise InputError(failure.problem, hint="Choose another place for --html.") from None


def page(result: Result) -> str:
    """The whole page."""
    view = View(result)
    title = f"rooftree bench: {result.target.name}"
    body = [
        markup.heading(title, 1),
        markup.paragraph(heading(result), "lead"),
        markup.paragraph(f"{result.environment.created_utc}; {_profile_line(result)}", "soft"),
        markup.warnings(result.warnings),
        *(markup.paragraph(line) for line in verdicts(view)),
        markup.heading("All arms"),
        arms_table(view),
        sets_table(view),
        more_table(view),
        *drafter_tables(view),
    ]
    tables = {
        "Speed": [*sweep_tables(view)],
        "Acceptance": [markup.folded("Acceptance by depth, in numbers", depth_table(view))],
        "Time": [accuracy_table(view)],
    }
    for section, pictures in gallery(view).items():
        body += [markup.heading(section), _figures(pictures), *tables.get(section, ())]
    body += [
        markup.heading("How it was measured"),
        markup.bullets(HOW),
        settings_facts(result),
        markup.heading("On what"),
        model_facts(result),
        environment_facts(result),
    ]
    return markup.document(title, body)


def verdicts(view: View) -> list[str]:
    """What the run says of each adaptive arm, in a sentence."""
    lines = []
    for arm in view.named("bastion"):
        own = view.figures(arm.name)
        if own.over_plain is None:
            continue
        text = (
            f"{arm.name} decodes {own.over_plain.pooled:.2f} times as fast as plain decoding"
            f"{_interval(own.over_plain)}"
        )
        if arm.updates and own.over_plain_end_to_end is not None:
            text += f", {own.over_plain_end_to_end.pooled:.2f} times end to end with its updates"
        if own.verification is not None:
            text += f", with {own.verification.pooled:.2f} tokens per verification"
        sweep = view.hindsight.get(arm.drafter or "")
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


def _figures(pictures: list[Picture]) -> str:
    """The pictures side by side where there is room, then what this run has no data for."""
    drawn = "".join(
        markup.figure(
            picture.title,
            inline_svg(picture.draw(), name=picture.name, label=picture.title),
            picture.caption,
        )
        for picture in pictures
        if picture.draw is not None
    )
    missing = [f"Not drawn: {one.title}: {one.missing}." for one in pictures if one.draw is None]
    return (f'<div class="figures">{drawn}</div>' if drawn else "") + markup.bullets(missing)
