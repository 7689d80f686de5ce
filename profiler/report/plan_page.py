"""A plan as one self-contained page of HTML: its answer, tables and pictures."""

from __future__ import annotations

from pathlib import Path

from costmodel.planning.result import Option, Plan
from profiler.report.html import TEMPLATES, Table, draw, render, save_page
from profiler.report.plan_pictures import plan_pictures
from profiler.report.plan_reasons import pays_line, pays_table
from profiler.report.plan_tables import (
    SERVER_COLUMNS,
    heading,
    interval,
    option_cells,
    option_columns,
    problems,
    server_rows,
    simulated_columns,
    simulated_lines,
    simulated_rows,
    simulated_title,
    tree_name,
)


def write_plan_page(plan: Plan, path: Path) -> Path:
    """Write the page in one step. Raises InputError where it cannot be written."""
    save_page(path, plan_page(plan))
    return path


def plan_page(plan: Plan) -> str:
    """The page of HTML."""
    best = plan.best
    return render(
        TEMPLATES / "plan.html",
        title=f"Capacity plan: {plan.request.target}",
        lead=heading(plan),
        summary=_summary(plan),
        problems=problems(plan),
        options=Table(
            name="options",
            columns=option_columns(plan),
            rows=[option_cells(option) for option in plan.options],
            caption="The best option first. Brackets hold 80 % intervals.",
        ),
        simulated=_simulated(plan),
        simulated_lines=simulated_lines(plan),
        figures=draw(plan_pictures(plan)),
        servers=[] if best is None else [*_pays(best), _server(best)],
        notes=plan.notes,
    )


def _summary(plan: Plan) -> list[str]:
    """Whether drafts pay, the best option, the acceptance data and the drafter."""
    lines = [
        f"Does it pay? {pays_line(plan, option)}." for option in plan.options if option.choices
    ]
    best = plan.best
    if best is not None and best.sizing is not None:
        sizing = best.sizing
        text = (
            f"Best: {interval(sizing.gpus, '.0f')} {best.gpu} with {tree_name(sizing.at_load)} at "
            f"{sizing.at_load.running} requests at once on a server: "
            f"{interval(sizing.tpot_s, '.1f', 1e3)} ms a token, "
            f"{interval(sizing.ttft_s, '.0f', 1e3)} ms to the first"
        )
        if sizing.cost_per_hour is not None:
            currency = plan.request.currency
            text += f", {interval(sizing.cost_per_hour, '.2f')} {currency} an hour"
            text += f", {interval(sizing.cost_per_million, '.2f')} {currency} a million tokens"
        lines.append(f"{text}.")
    if plan.acceptance is not None:
        lines.append(f"Acceptance: {plan.acceptance.label}.")
    if best is not None and best.drafter:
        lines.append(f"Drafter: {best.drafter.label}.")
    return lines


def _simulated(plan: Plan) -> Table | None:
    if not plan.simulated:
        return None
    return Table(
        name="simulated",
        columns=simulated_columns(plan),
        rows=simulated_rows(plan),
        caption=simulated_title(plan),
    )


def _pays(option: Option) -> list[Table]:
    """The best option's speed-ups; none where nothing is drafted."""
    if not option.choices:
        return []
    columns, rows = pays_table(option)
    return [
        Table(
            name="pays",
            title=f"{option.gpu}, speed-up over plain",
            columns=columns,
            rows=rows,
            caption="By requests at once, with the drafted tokens in brackets; * is the best.",
        )
    ]


def _server(option: Option) -> Table:
    return Table(
        name="server",
        title=f"{option.gpu}, one server",
        columns=SERVER_COLUMNS,
        rows=server_rows(option),
        caption="The best draft at each number of requests at once.",
    )
