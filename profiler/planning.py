"""How a plan is printed, as a table and otherwise, and what of it is exported."""

from __future__ import annotations

import csv
import dataclasses
import io

import click

from costmodel.capacity.acceptance_data import find_acceptance
from costmodel.capacity.exports import export
from costmodel.capacity.lookup import find_plan_target
from costmodel.capacity.operating import OperatingPoint, Policy
from costmodel.capacity.plan_record import flat_rows
from costmodel.capacity.planner import Option, Plan, make_server, steps_for
from costmodel.capacity.sizing import Interval
from costmodel.errors import InputError
from costmodel.registry import ProfileStore
from profiler.plan_simulation import (
    SIMULATED_COLUMNS,
    simulated_lines,
    simulated_rows,
    simulated_title,
)
from profiler.render import note, print_json, print_table

COLUMNS = (
    "GPU", "tp", "GPUs", "at once", "tree", "tokens a cycle", "tpot ms", "ttft ms", "per hour",
    "per 1M tokens", "J a token", "times from",
)  # fmt: skip


def print_plan(plan: Plan, form: str) -> None:
    """The plan on stdout as a table, JSON, CSV or one page of HTML."""
    if form == "json":
        print_json(plan.as_dict())
    elif form == "csv":
        click.echo(as_csv(plan), nl=False)
    elif form == "html":
        from profiler.plan_html import plan_page

        click.echo(plan_page(plan), nl=False)
    else:
        _print_tables(plan)


def as_csv(plan: Plan) -> str:
    """One line an option."""
    rows = flat_rows(plan)
    page = io.StringIO()
    writer = csv.DictWriter(page, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return page.getvalue()


def option_cells(option: Option) -> list[str | None]:
    """One row of the table, in the order of COLUMNS."""
    sizing = option.sizing
    if sizing is None:
        return [option.gpu, str(option.tensor_parallel), *[None] * (len(COLUMNS) - 2)]
    at = sizing.at_load
    tree = at.shape if at.shape == "plain" else f"{at.shape} {at.nodes}"
    joules = sizing.joules_per_token
    origin = option.origin
    return [
        option.gpu,
        str(option.tensor_parallel),
        interval(sizing.gpus, ".0f"),
        f"{at.running} of {sizing.at_most.running}",
        tree,
        f"{at.committed:.2f}",
        interval(sizing.tpot_s, ".1f", 1e3),
        interval(sizing.ttft_s, ".0f", 1e3),
        interval(sizing.cost_per_hour, ".2f"),
        interval(sizing.cost_per_million, ".2f"),
        None if joules is None else f"<= {joules:.2f}",
        None if origin is None else f"{origin.kind}, +-{option.error:.0%}",
    ]


def interval(value: Interval | None, form: str, unit: float = 1.0) -> str | None:
    """`5 (4 to 7)`; a missing upper end is where the goals are missed."""
    if value is None:
        return None
    high = "goals missed" if value.high is None else f"{value.high * unit:{form}}"
    middle, low = f"{value.value * unit:{form}}", f"{value.low * unit:{form}}"
    return middle if low == middle == high else f"{middle} ({low} to {high})"


def problems(plan: Plan) -> list[str]:
    """One line for each option that cannot be, with the nearest that can."""
    return [
        f"{option.gpu} tp {option.tensor_parallel}: {option.problem}; nearest: {option.nearest}"
        for option in plan.options
        if option.sizing is None
    ]


def heading(plan: Plan) -> str:
    """What was asked, in one line."""
    request = plan.request
    traffic = request.traffic
    return (
        f"{request.target}: {round(request.rate, 3):g} requests/s of "
        f"{round(traffic.prompt_tokens, 1):g} + {round(traffic.output_tokens, 1):g} tokens, "
        f"{request.goals.words()}, {request.engine}"
    )


def refuse_infeasible(plan: Plan) -> None:
    """Raise InputError, for the exit code, where no option could be sized."""
    if plan.best is None:
        what = "holds the goals" if plan.request.goals else "can be planned"
        raise InputError(f"no option {what}", hint="The nearest of each is named above")
    if plan.simulated and all(found.problem for found in plan.simulated):
        raise InputError(f"nothing could be simulated: {plan.simulated[0].problem}")
    if plan.simulated and not any(found.enough for found in plan.simulated):
        raise InputError(
            "no option holds the goals in the simulation",
            hint="What the largest fleets reach is named above",
        )


def export_settings(plan: Plan, engine: str) -> str:
    """The best option's settings for an engine. Raises InputError where there is none."""
    best = plan.best
    if best is None or best.sizing is None:
        raise InputError(
            "there is nothing to export: no option holds the goals",
            hint="; ".join(problems(plan)),
        )
    if plan.acceptance is None and plan.request.policy.kind != "plain":
        note(
            "note: no acceptance data, so nothing is drafted; --acceptance gsm8k, a rate or a file"
        )
    points = list(best.points)
    if engine in ("vllm", "sglang") and plan.request.policy.kind != "plain":
        points = _chains(plan, best)
    return export(engine, plan.request.target, best.tensor_parallel, points, best.sizing.at_load)


def _chains(plan: Plan, option: Option) -> list[OperatingPoint]:
    """The best chain or plain step at each concurrency: these engines draft no trees."""
    request = plan.request
    if request.acceptance is None:
        return list(option.points)
    chains = dataclasses.replace(request, policy=Policy(kind="chain"))
    acceptance = find_acceptance(request.acceptance, request.target, request.temperature)
    target = find_plan_target(request.target)
    steps = steps_for(chains, target, (option.gpu, option.tensor_parallel), ProfileStore())
    server = make_server(chains, steps, acceptance)
    return server.points(request.traffic, request.most_running)


def _print_tables(plan: Plan) -> None:
    note(heading(plan))
    if plan.acceptance is not None:
        gain = plan.acceptance.spread
        note(f"acceptance: {plan.acceptance.label}, +-{gain:.0%} of what drafts add")
    print_table(COLUMNS, [option_cells(option) for option in plan.options])
    for line in problems(plan):
        click.echo(line)
    if plan.simulated:
        click.echo()
        print_table(SIMULATED_COLUMNS, simulated_rows(plan), title=simulated_title(plan))
        for line in simulated_lines(plan):
            click.echo(line)
    best = plan.best
    if best is not None and plan.request.policy.kind != "plain" and plan.acceptance is not None:
        click.echo()
        print_table(
            ("at once", "tree", "tokens a cycle", "tpot ms", "ttft ms", "requests/s"),
            [
                [p.running, p.shape if p.shape == "plain" else f"{p.shape} {p.nodes}",
                 f"{p.committed:.2f}", f"{p.tpot_s * 1e3:.1f}", f"{p.ttft_s * 1e3:.0f}",
                 f"{p.requests_per_s:.1f}"]
                for p in best.points
            ],
            title=f"{best.gpu}, one server",
        )  # fmt: skip
    if best is not None and best.drafter:
        note(f"drafter: {best.drafter}")
    for line in plan.notes:
        note(f"note: {line}")
