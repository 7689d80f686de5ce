"""A result and a comparison as tables on stdout."""

from __future__ import annotations

from collections.abc import Sequence

import click

from profiler.bench.cells import interval_text, number_text, ratio_text
from profiler.bench.compare import Comparison
from profiler.bench.figures import ArmFigures, arm_figures
from profiler.bench.hindsight import Hindsight, hindsight
from profiler.bench.record import Result
from profiler.bench.sections import sections
from profiler.render import note, print_table

COLUMNS = (
    "arm", "tokens/s", "over plain", "95 % interval", "end to end", "first token", "per token",
    "tokens/verification", "without bonus", "nodes", "drafting", "differing",
)  # fmt: skip


def print_result(result: Result) -> None:
    """The tables of arms, sweeps and drafters beside each other on stdout, warnings on stderr."""
    click.echo(heading(result))
    if result.profile is not None:
        click.echo(f"tree sizes by {result.profile.line}")
    figures = [arm_figures(result, arm.name) for arm in result.arms]
    print_table(COLUMNS, [arm_cells(own) for own in figures])
    if len(result.sets) > 1:
        _print_sets(result)
    for drafter in result.drafters:
        sweep = hindsight(result, drafter.name)
        if sweep is not None:
            _print_sweep(sweep)
    for section in sections(result):
        print_table(section.columns, section.rows, title=section.title)
    for line in accuracy_lines(figures):
        click.echo(line)
    for warning in result.warnings:
        note(f"warning: {warning}")


def heading(result: Result) -> str:
    """One line: what was run, and on what."""
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


def arm_cells(own: ArmFigures) -> list[str | None]:
    """One arm's row, in the order of `COLUMNS`."""
    checked = own.verification
    return [
        own.arm,
        number_text(own.tokens_per_s, ".1f"),
        ratio_text(own.over_plain),
        interval_text(own.over_plain),
        ratio_text(own.over_plain_end_to_end),
        f"{1e3 * own.first_token_s:.1f} ms",
        None if own.per_token_s is None else f"{1e3 * own.per_token_s:.2f} ms",
        None if checked is None else f"{checked.pooled:.2f}",
        None if checked is None else f"{checked.pooled_without_bonus:.2f}",
        number_text(own.nodes_mean, ".1f"),
        None if own.draft_time_share is None else f"{own.draft_time_share:.1%}",
        None if own.differing is None else f"{own.differing}",
    ]


def accuracy_lines(figures: Sequence[ArmFigures]) -> list[str]:
    """What the adaptive arms went by, against what happened; and how fast plain steps are."""
    lines = []
    for own in figures:
        if own.bandwidth_share is not None:
            lines.append(f"{own.arm}: {own.bandwidth_share:.0%} of the bandwidth limit")
        error, paths = own.verify_error, own.path_scores
        if error is None or paths is None or error.median is None or error.p95 is None:
            continue
        lines.append(
            f"{own.arm}: forwards predicted to {error.median:.1%} (median; {error.p95:.0%} at the "
            f"95th percentile); committed {paths.realised_mean:.2f} a round with a tree, "
            f"{paths.predicted_mean:.2f} predicted (Pearson {number_text(paths.pearson, '.2f')}, "
            f"Spearman {number_text(paths.spearman, '.2f')})"
        )
    return lines


def _print_sets(result: Result) -> None:
    rows = []
    for arm in result.arms:
        cells: list[str | None] = [arm.name]
        for name in result.sets:
            own = arm_figures(result, arm.name, name)
            checked = own.verification
            length = "" if checked is None else f" ({checked.pooled:.2f})"
            cells.append(f"{ratio_text(own.over_plain) or '-'}{length}")
        rows.append(cells)
    title = "over plain decoding, and tokens a verification, by prompt set"
    print_table(("arm", *result.sets), rows, title=title)


def _print_sweep(sweep: Hindsight) -> None:
    columns = ("arm", "best single size", "interval", "best of each set", "interval",
               "best of each prompt", "interval")  # fmt: skip
    rows = [
        [
            own.arm,
            *(
                text
                for ratio in (own.single, own.per_set, own.per_prompt)
                for text in (ratio_text(ratio), interval_text(ratio))
            ),
        ]
        for own in sweep.against
    ]
    best = f"best single size: {sweep.single_best}, {sweep.single_tokens_per_s:.1f} tokens/s"
    print_table(columns, rows, title=f"against sizes chosen in hindsight ({best})")


def print_comparison(comparison: Comparison) -> None:
    """The table on stdout, what else differs on stderr."""
    rows = [
        [
            own.arm,
            own.verdict,
            ratio_text(own.ratio),
            interval_text(own.ratio),
            ratio_text(own.beside_plain),
            interval_text(own.beside_plain),
            own.differing,
        ]
        for own in comparison.arms
    ]
    columns = ("arm", "second is", "ratio", "interval", "beside plain", "interval", "other texts")
    print_table(columns, rows)
    for which, names in (("first", comparison.only_first), ("second", comparison.only_second)):
        if names:
            note(f"only in the {which}: {', '.join(names)}")
    for warning in comparison.warnings:
        note(f"differs: {warning}")
