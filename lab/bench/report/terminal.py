"""A result as tables on stdout, warnings on stderr."""

from __future__ import annotations

import click

from lab.bench.analysis.papers import WHY_THEY_DIFFER
from lab.bench.analysis.ratios import compare_arms
from lab.bench.analysis.summary import ResultFigures
from lab.bench.record import Result
from lab.bench.report.published import paper_table
from lab.bench.report.tables import (
    arms_table,
    drafter_tables,
    engine_tables,
    heading,
    hindsight_table,
    number_text,
    papers_table,
    sets_table,
)
from profiler.report.console import note, print_table


def print_result(result: Result) -> None:
    """The tables of arms, prompt sets, sweeps and related drafters and engines, then accuracy."""
    figures = ResultFigures(result)
    click.echo(heading(result))
    if result.profile is not None:
        click.echo(f"tree sizes by {result.profile.line}")
    arms = arms_table(figures)
    print_table(arms.columns, arms.rows)
    sets = [sets_table(figures)] if len(result.sets) > 1 else []
    sweeps = map(hindsight_table, figures.hindsight.values())
    paper = paper_table(result)
    if paper is not None and result.protocol is not None:
        print_table(paper.columns, paper.rows, title=paper.title, keys=2)
        for line in result.protocol.differs:
            note(f"other than the paper: {line}")
    for table in (*sets, *sweeps, *engine_tables(result), *drafter_tables(figures)):
        print_table(table.columns, table.rows, title=table.title)
    papers = papers_table(result)
    print_table(papers.columns, papers.rows, title=papers.title)
    click.echo(WHY_THEY_DIFFER)
    for line in _accuracy_lines(figures):
        click.echo(line)
    click.echo(winner_line(figures))
    for warning in result.warnings:
        note(f"warning: {warning}")


def winner_line(figures: ResultFigures) -> str:
    """The fastest arm beside the next one; empty where fewer than two were timed."""
    rates = {one.name: figures.of(one.name).tokens_per_s or 0.0 for one in figures.result.arms}
    first, second, *_ = [*sorted(rates, key=lambda name: -rates[name]), "", ""]
    ratio = compare_arms(figures.result, first, second) if second else None
    if ratio is None:
        return ""
    inside = "" if ratio.low is None else f" (95 % interval {ratio.low:.2f} to {ratio.high:.2f})"
    close = "" if ratio.verdict == "faster" else ": too close to call"
    return f"Fastest: {first}, {ratio.pooled:.2f} times as fast as {second}{inside}{close}"


def _accuracy_lines(figures: ResultFigures) -> list[str]:
    """Bandwidth share of plain arms; predicted against measured figures of adaptive ones."""
    lines = []
    for arm in figures.result.arms:
        one = figures.of(arm.name)
        if one.bandwidth_share is not None:
            lines.append(f"{one.arm}: {one.bandwidth_share:.0%} of the bandwidth limit")
        error, paths = one.verify_error, one.path_scores
        if error is None or paths is None or error.median is None or error.p95 is None:
            continue
        lines.append(
            f"{one.arm}: forwards predicted to {error.median:.1%} (median; {error.p95:.0%} at the "
            f"95th percentile); committed {paths.realised_mean:.2f} a round with a tree, "
            f"{paths.predicted_mean:.2f} predicted (Pearson {number_text(paths.pearson, '.2f')}, "
            f"Spearman {number_text(paths.spearman, '.2f')})"
        )
    return lines
