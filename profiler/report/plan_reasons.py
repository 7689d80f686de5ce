"""Whether speculation pays in a plan, and what a row's time is made of, as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import click

from costmodel.errors import InputError
from costmodel.planning.result import Option, Plan, ShapeRange, shape_ranges
from costmodel.planning.servers import BatchChoice, OperatingPoint
from profiler.report.console import print_table

# Causes of a cycle's time, in the order of `CycleParts`.
CAUSES = {
    "weights_s": "weights and products",
    "attention_s": "attention",
    "communication_s": "communication",
    "draft_s": "draft",
    "acceptance_s": "tree and acceptance",
    "prompts_s": "prompts of others",
    "engine_s": "engine and gaps",
}


def print_pays(plan: Plan) -> None:
    """Print whether drafts pay: a line for each option, and the best option's speed-ups."""
    if plan.request.policy.kind == "plain":
        click.echo("Does it pay? Not asked: the policy is plain\n")
        return
    if plan.acceptance is None:
        click.echo("Does it pay? Nothing is known without acceptance data: give --acceptance\n")
        return
    options = [option for option in plan.options if option.choices]
    for option in options:
        click.echo(f"Does it pay? {pays_line(plan, option)}")
        if option.with_trees:
            click.echo(f"  {trees_line(plan, option)}")
    for option in options[:1]:
        print_table(*pays_table(option), title=f"{option.gpu}, speed-up over plain (nodes)")
        click.echo()


def pays_table(option: Option) -> tuple[list[str], list[list[str | None]]]:
    """Columns and rows: requests at once, plain milliseconds, speed-up and size of each shape."""
    columns = ["at once", "plain ms", *_columns(option.choices)]
    rows = [_cells(choice, _columns(option.choices)) for choice in option.choices]
    if "tree" in _columns(option.with_trees):
        columns.append("tree in rooftree")
        cells = {c.running: _cells(c, ["tree"])[-1] for c in option.with_trees}
        rows = [[*row, cells.get(int(row[0] or 0))] for row in rows]
    return columns, rows


def pays_line(plan: Plan, option: Option) -> str:
    """One sentence: the speed-up at this rate, and which shape is best up to which batch."""
    engine = plan.request.engine
    text = f"{option.gpu} tp {option.tensor_parallel}, {engine}: "
    at = option.sizing.at_load if option.sizing else None
    choice = next((c for c in option.choices if at and c.running == at.running), None)
    if choice is not None:
        text += f"{choice.speedup(choice.best):.2f}x with {choice.running} at once; "
    return text + _ranges(shape_ranges(option.choices))


def trees_line(plan: Plan, option: Option) -> str:
    """What this project's decoder would run there, where the engine verifies no trees."""
    ranges = _ranges(shape_ranges(option.with_trees))
    return f"Trees, which {plan.request.engine} does not verify: in rooftree {ranges}"


def _ranges(ranges: Sequence[ShapeRange]) -> str:
    """`trees to 24, chains to 96, plain beyond`, by requests at once."""
    names = {"plain": "plain", "chain": "chains", "tree": "trees"}
    if len(ranges) == 1:
        return f"{names[ranges[0].shape]} at every number at once"
    parts = [f"{names[one.shape]} to {one.last}" for one in ranges[:-1]]
    return ", ".join([*parts, f"{names[ranges[-1].shape]} beyond"])


def _columns(choices: Sequence[BatchChoice]) -> list[str]:
    """The shapes that are planned at some number of requests at once."""
    shapes = ("chain", "tree")
    return [s for s in shapes if any(getattr(choice, s) is not None for choice in choices)]


def _cells(choice: BatchChoice, shapes: Sequence[str]) -> list[str | None]:
    """Requests at once, plain milliseconds, and speed-up and size of each shape; best: `*`."""
    cells: list[str | None] = [str(choice.running), f"{choice.plain.tpot_s * 1e3:.1f}"]
    for shape in shapes:
        point: OperatingPoint | None = getattr(choice, shape)
        best = "*" if choice.best.shape == shape else ""
        cells.append(point and f"{choice.speedup(point):.2f}x ({point.nodes}){best}")
    return cells


def print_why(plan: Plan, running: int) -> None:
    """Print what the time of each option's row is made of; `running` 0 is the row at the load.

    Raises InputError for a number of requests at once that no option has.
    """
    rows = [(option, point) for option in plan.options if (point := _row(option, running))]
    if not rows:
        planned = sorted({point.running for option in plan.options for point in option.points})
        raise InputError(
            f"no option has a row of {running} at once",
            hint=f"There are rows of {', '.join(map(str, planned))}",
        )
    for option, point in rows:
        title = (
            f"{option.gpu} tp {option.tensor_parallel}, {point.running} at once, {_shape(point)}"
        )
        click.echo()
        print_table(("cause", "ms a cycle", "share"), why_rows(point), title=title)
        plain = next(c.plain for c in option.choices if c.running == point.running)
        click.echo(
            f"accepted: {point.committed:.2f} tokens a cycle of {point.cycle_s * 1e3:.2f} ms are"
            f" {point.tpot_s * 1e3:.2f} ms a token; plain {plain.tpot_s * 1e3:.2f}"
        )


def why_rows(point: OperatingPoint) -> list[list[str]]:
    """Cause, milliseconds and share of one cycle."""
    if point.parts is None:
        return []
    return [
        [CAUSES[name], f"{seconds * 1e3:.3f}", f"{seconds / point.cycle_s:.1%}"]
        for name, seconds in dataclasses.asdict(point.parts).items()
    ]


def _row(option: Option, running: int) -> OperatingPoint | None:
    if running == 0:
        return option.sizing.at_load if option.sizing else None
    return next((point for point in option.points if point.running == running), None)


def _shape(point: OperatingPoint) -> str:
    return point.shape if point.shape == "plain" else f"{point.shape} {point.nodes}"
