"""Tables and the picture of a plan: cells, headings and remarks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

from costmodel.errors import InputError
from costmodel.planning.request import seconds_text
from costmodel.planning.result import Fleet, Plan, PlanOption, TimeSpread, shape_ranges
from costmodel.planning.servers import BatchChoice, Interval, OperatingPoint
from profiler.report import drawing
from profiler.report.console import note, paragraph, print_json, print_table

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
PICTURE_IN = (6.6, 4.4)
CLOSE = 5  # most rivals of the best that are named
# The columns that are printed without --details.
OPTIONS = ("GPU", "tp", "GPUs", "at once", "tree", "ms a token", "ms to the first", "per hour")
SIMULATED = ("GPU", "tp", "GPUs", "busy", "ttft p95 ms", "tpot p95 ms", "goals", "per hour")
Table = tuple[list[str], list[list[str | None]]]  # columns and rows


def as_table(
    plan: Plan, rows: Sequence[Mapping[str, str | None]], shown: Sequence[str] | None
) -> Table:
    """The columns of the rows that are `shown` (None: all) and are not empty."""
    names = [name for name in shown or (rows[0] if rows else ()) if any(r[name] for r in rows)]
    units = [f"{plan.request.currency} " * name.startswith("per ") for name in names]
    columns = [unit + name for unit, name in zip(units, names, strict=True)]
    return columns, [[row[name] for name in names] for row in rows]


def option_table(plan: Plan, details: bool) -> Table:
    rows = []
    shown = interval if details else middle
    for option in plan.options:
        sizing, origin = option.sizing, option.origin
        if sizing is None:
            continue
        at, ttft = sizing.at_load, shown(sizing.ttft_s, ".0f", 1e3)
        rows.append({
            "GPU": option.gpu,
            "tp": str(option.tensor_parallel),
            "GPUs": shown(sizing.gpus, ".0f"),
            "at once": f"{at.running} of {sizing.at_most.running}",
            "tree": tree_name(at),
            "ms a token": shown(sizing.tpot_s, ".1f", 1e3),
            "ms to the first": "queues" if plan.queues(option) else ttft,
            "per hour": shown(sizing.cost_per_hour, ".2f"),
            "per 1M tokens": shown(sizing.cost_per_million, ".2f"),
            "tokens a cycle": f"{at.committed:.2f}",
            "J a token": shown(sizing.joules_per_token, ".2f"),
            "times from": None if origin is None else f"{origin.kind}, +-{option.error:.0%}",
        })  # fmt: skip
    return as_table(plan, rows, None if details else OPTIONS)


def interval(
    value: Interval | None, form: str, unit: float = 1.0, beyond: str = "goals missed"
) -> str | None:
    """A value with its interval, such as `5 (4 to 7)`."""
    if value is None:
        return None
    high = beyond if value.high is None else f"{value.high * unit:{form}}"
    low, text = f"{value.low * unit:{form}}", middle(value, form, unit)
    return text if low == text == high else f"{text} ({low} to {high})"


def middle(value: Interval | None, form: str, unit: float = 1.0) -> str | None:
    return None if value is None else f"{value.value * unit:{form}}"


def tree_name(point: OperatingPoint) -> str:
    """The draft tree of a point, such as `chain 7`, or `plain`."""
    return point.shape if point.shape == "plain" else f"{point.shape} {point.nodes}"


def heading(plan: Plan) -> str:
    request = plan.request
    traffic = request.traffic
    return (
        f"{request.target}: {round(request.rate, 3):g} requests/s of "
        f"{round(traffic.prompt_tokens, 1):g} + {round(traffic.output_tokens, 1):g} tokens, "
        f"{request.goals.describe()}, {request.engine_name}"
    )


def plot_plan(plan: Plan, path: Path) -> Path:
    """Draw cost against milliseconds a token, one curve a GPU; returns the picture's path.

    A star is the plan's choice at its rate, in whole GPUs. Without prices the cost is in GPU hours.
    Raises InputError without an option, and for a file that cannot be written, or is no picture.
    """
    drawing.check_picture(path)
    request, prices = plan.request, plan.request.prices
    drawn = [one for one in plan.options if one.points and (not prices or one.gpu in prices)]
    if not drawn:
        raise InputError("no option can be drawn", hint="The nearest of each is named above")
    if len(drawn) > len(drawing.SERIES):
        note(f"{path} has the first {len(drawing.SERIES)} of {len(drawn)} options")
    figure, (axes,) = drawing.panels(1, size_in=PICTURE_IN)

    def cost(gpu: str, gpus: float, requests_per_s: float) -> float:
        hours = gpus / (3600 * requests_per_s * request.traffic.output_tokens)
        return 1e6 * hours * prices.get(gpu, 1.0)

    for option, color in zip(drawn, drawing.SERIES, strict=False):
        gpu, degree, sizing = option.gpu, option.tensor_parallel, option.sizing
        at = [(p.tpot_s * 1e3, cost(gpu, degree, p.requests_per_s)) for p in option.points]
        axes.plot(*zip(*at, strict=True), ".-", color=color, label=f"{gpu} tp {degree}")
        for point, place in ((option.points[0], at[0]), (option.points[-1], at[-1])):
            axes.annotate(f" {point.running}", place, color=color, fontsize=8)
        if sizing is not None:
            whole = cost(gpu, sizing.gpus.value, request.rate / max(sizing.load, 1.0))
            axes.plot(sizing.tpot_s.value * 1e3, whole, "*", color=color, markersize=13)
    if request.goals.tpot_s is not None:
        axes.axvline(request.goals.tpot_s * 1e3, color=drawing.GRAY, linestyle="--", label="goal")
    drawing.log_axes(axes, "xy")
    axes.set_xlabel("ms a token (numbers: requests at once; stars: this plan)", fontsize=9)
    currency = request.currency if prices else "GPU hours"
    axes.set_ylabel(f"{currency} per 1M output tokens", fontsize=9)
    axes.legend(fontsize=8)
    drawing.set_title(figure, heading(plan))
    return drawing.save_figure(figure, path)


def refuse_infeasible(plan: Plan) -> None:
    """Raise InputError where no option holds the goals, to set the exit code."""
    if plan.best is None:
        planned = plan.request.goals and any(option.points for option in plan.options)
        what = "holds the goals" if planned else "can be planned"
        raise InputError(f"no option {what}", hint="The nearest of each is named above")
    if plan.simulated and all(option.problem for option in plan.simulated):
        raise InputError(f"nothing could be simulated: {plan.simulated[0].problem}")
    if plan.simulated and not any(option.enough for option in plan.simulated):
        raise InputError(
            "no option holds the goals in the simulation",
            hint="What the largest fleets reach is named above",
        )


def print_plan(plan: Plan, *, details: bool = False) -> None:
    """Print the plan: the best, whether drafts pay, tables; heading and notes on stderr.

    details  intervals and all columns, speed-ups and one server by requests at once, and causes
    """
    _say(f"Best: {best_line(plan)}")
    print_pays(plan, details)
    note(paragraph(heading(plan)))
    if plan.acceptance is not None:
        spread = plan.acceptance.spread
        note(paragraph(f"acceptance: {plan.acceptance.label}, +-{spread:.0%} of what drafts add"))
    if any(option.sizing for option in plan.options):
        print_table(*option_table(plan, details), keys=2)
    for option in plan.options:
        if option.sizing is None:
            _say(option.describe_problem())
    if plan.simulated:
        click.echo()
        settings = plan.request.simulation
        title = settings and f"simulated: {settings.describe()}"
        print_table(*simulated_table(plan, details), title=title, keys=3)
        for line in simulated_lines(plan):
            _say(line)
    best = plan.best
    if best is not None and details:
        click.echo()
        print_server(best)
        point = best.sizing.at_load if best.sizing else None
        if point is not None and point.parts is not None:
            shares = ", ".join(
                f"{CAUSES[name]} {seconds / point.cycle_s:.0%}"
                for name, seconds in dataclasses.asdict(point.parts).items()
                if seconds > 0
            )
            cycle = f"a cycle of {point.cycle_s * 1e3:.2f} ms with {point.running} at once"
            _say(f"{best.gpu}, {cycle}: {shares}")
    if best is not None and best.drafter:
        weights, token = best.draft_bytes
        takes = f"{weights / 1e9:.1f} GB and {token / 1e3:.0f} kB a cached token of each GPU"
        takes = takes if weights else "no memory of a GPU"
        note(paragraph(f"drafter: {best.drafter.label}; it takes {takes}"))
    errors = sorted({option.error for option in plan.options if option.error is not None})
    if errors and not details:
        span = " to ".join(dict.fromkeys(f"{error:.0%}" for error in (errors[0], errors[-1])))
        note(paragraph(f"times are expected within {span}; intervals and the rest: --details"))
    for line in plan.notes:
        note(paragraph(f"note: {line}"))
    if plan.assumptions:
        note("what every plan of this kind assumes: docs/planning.md, or --json (assumptions)")


def best_line(plan: Plan) -> str:
    """What to buy, in one sentence, and the others that are no worse inside the errors."""
    best = plan.best
    if best is None or best.sizing is None:
        planned = any(option.points for option in plan.options)
        return f"none: no option {'holds the goals' if planned else 'can be planned'}"
    at, sizing = best.sizing.at_load, best.sizing
    text = f"{interval(sizing.gpus, '.0f')} {best.gpu} tp {best.tensor_parallel}, {tree_name(at)}"
    text += f", {at.tpot_s * 1e3:.1f} ms a token"
    if sizing.cost_per_hour is not None:
        text += f", {sizing.cost_per_hour.value:.2f} {plan.request.currency} an hour"
    close = [f"{option.gpu} tp {option.tensor_parallel}" for option in plan.rivals]
    more = f" and {len(close) - CLOSE} more" if len(close) > CLOSE else ""
    return text + (f"; too close to call: {', '.join(close[:CLOSE])}{more}" if close else "")


def _say(text: str) -> None:
    click.echo(paragraph(text))


def print_server(option: PlanOption) -> None:
    """Print one server by requests at once: its best tree, times, speed-ups over plain steps."""
    shapes = [s for s in ("chain", "tree") if any(getattr(one, s) for one in option.choices)]
    rooftree = {one.running: one for one in option.with_trees if one.tree}
    columns = ["at once", "tree", "ms a token", "ms to the first", "requests/s", "plain ms"]
    rows = []
    for choice in option.choices:
        point, cells = choice.best, [_faster(choice, shape) for shape in shapes]
        if rooftree:
            cells.append(_faster(rooftree.get(choice.running), "tree"))
        rows.append([str(point.running), tree_name(point), f"{point.tpot_s * 1e3:.1f}",
                     f"{point.ttft_s * 1e3:.0f}", f"{point.requests_per_s:.1f}",
                     f"{choice.plain.tpot_s * 1e3:.1f}", *cells])  # fmt: skip
    columns += [*shapes, "tree in rooftree"] if rooftree else shapes
    print_table(columns, rows, title=f"{option.gpu}, one server; speed-ups over plain (nodes)")


def _faster(choice: BatchChoice | None, shape: str) -> str | None:
    point: OperatingPoint | None = getattr(choice, shape, None)
    return point and f"{choice.speedup(point):.2f}x ({point.nodes})"


def simulated_table(plan: Plan, details: bool) -> Table:
    """The fleet that the means need, and the smallest that holds all goals where it is larger.

    Where no fleet holds them, the second row is the largest that was tried.
    """
    rows, held = [], "held" if plan.request.goals else None
    for option in plan.simulated:
        price = plan.request.prices.get(option.gpu)
        for fleet in dict.fromkeys((option.planned, option.enough or option.nearest)):
            if fleet is None:
                continue
            times = {
                f"{name} {percent} ms": _cell(getattr(fleet, name), percent, fleet, form)
                for name, form in (("ttft", ".0f"), ("tpot", ".1f"))
                for percent in ("p50", "p95", "p99")
            }
            rows.append({
                "GPU": option.gpu,
                "tp": str(option.tensor_parallel),
                "GPUs": str(fleet.gpus),
                "busy": f"{fleet.utilisation:.0%}",
                "at once": f"{fleet.running:.1f}",
                "waiting p95 ms": _cell(fleet.waiting, "p95", fleet),
                **times,
                "goals": f"missed: {', '.join(fleet.missed)}" if fleet.missed else held,
                "per hour": None if price is None else f"{fleet.gpus * price:.2f}",
            })  # fmt: skip
    return as_table(plan, rows, None if details else SIMULATED)


def simulated_lines(plan: Plan) -> Iterator[str]:
    """One line per option whose means need fewer GPUs than all goals, or whose goals are missed."""
    for option in plan.simulated:
        name, fleet = f"{option.gpu} tp {option.tensor_parallel}", option.planned
        if fleet is None:
            yield f"{name}: not simulated: {option.problem}"
        elif option.enough is None:
            nearest, reached = option.nearest or fleet, []
            for missed in () if nearest.overloaded else nearest.missed:
                metric, _, percent = missed.partition(".")
                value_s = getattr(getattr(nearest, metric), percent or "mean").value
                reached.append(f"{missed} {seconds_text(value_s)}")
            yield (
                f"{name}: no fleet of up to {option.tried_gpus} GPUs holds"
                f" {', '.join(nearest.missed)}; nearest: {', '.join(reached) or 'the queue grows'}"
            )
        elif plan.request.replays:
            tpot = "" if fleet.tpot is None else f", {seconds_text(fleet.tpot.mean.value)} a token"
            yield (
                f"{name}: the trace takes {seconds_text(fleet.makespan_s)} on {fleet.gpus} GPU(s),"
                f" in the mean {seconds_text(fleet.ttft.mean.value)} to the first token{tpot}"
            )
        elif option.enough is not fleet:
            yield (
                f"{name}: {fleet.gpus} GPUs hold the means, but not"
                f" {', '.join(fleet.missed)}; {option.enough.gpus} hold all goals"
            )
    costs = [
        (one.cost_per_hour is None, one.cost_per_hour or 0.0, one.enough.gpus, one.gpu)
        for one in plan.simulated
        if one.enough is not None
    ]
    if costs and plan.best is not None:
        unpriced, cost, gpus, gpu = min(costs, key=lambda one: one[:3])
        if gpu != plan.best.gpu:
            price = "the fewest GPUs" if unpriced else f"the least cost, {cost:.2f} an hour"
            yield f"all goals are held with {price} by {gpus} {gpu}"


def _cell(spread: TimeSpread | None, percent: str, fleet: Fleet, form: str = ".0f") -> str | None:
    """A percentile in ms, p95 with its interval; `grows` for a queue that grows."""
    if spread is None:
        return None
    if fleet.overloaded:
        return "grows"
    value: Interval = getattr(spread, percent)
    if percent != "p95":
        return f"{value.value * 1e3:{form}}"
    return interval(value, form, 1e3, beyond="grows")


def print_settings(plan: Plan, engine: str, settings: str, as_json: bool) -> None:
    """Print an engine's settings, and note where nothing is drafted for want of acceptance."""
    needless = engine.startswith("sglang-dspark") or plan.request.policy.kind == "plain"
    if plan.acceptance is None and not needless:
        note("note: no acceptance data, nothing is drafted; --acceptance gsm8k, a rate or a file")
    if as_json:
        print_json({"engine": engine, "settings": settings})
    else:
        click.echo(settings, nl=False)


def print_pays(plan: Plan, details: bool) -> None:
    if plan.request.policy.kind == "plain":
        click.echo("Does it pay? Not asked: the policy is plain\n")
        return
    if plan.acceptance is None:
        _say(f"Does it pay? {published_line(plan)}")
        click.echo()
        return
    options, engine = [option for option in plan.options if option.choices], plan.request.engine
    for option in options if details else options[:1]:
        # The speed-up at this rate, and which shape is best up to which batch.
        text = f"{option.gpu} tp {option.tensor_parallel}, {engine}: "
        at = option.sizing.at_load if option.sizing else None
        choice = next((c for c in option.choices if at and c.running == at.running), None)
        if choice is not None:
            text += f"{choice.speedup(choice.best):.2f}x with {choice.running} at once; "
        _say(f"Does it pay? {text}{_ranges(option.choices)}")
        if option.with_trees:
            ranges = _ranges(option.with_trees)
            _say(f"Trees, which {engine} does not verify: in rooftree {ranges}")
    if options:
        click.echo()


def published_line(plan: Plan) -> str:
    """The range of published speed-ups, and the option that plans with one's own acceptance."""
    best, ask = plan.best, "--acceptance takes gsm8k, a rate such as 0.8, or a file"
    if best is None or best.sizing is None or not plan.published:
        return f"Not known without acceptance data: {ask}"
    names = [label.removeprefix("published for ").partition(",")[0] for label, _ in plan.published]
    ends = [f"{x:.2f}x ({name})" for name, (_, x) in zip(names, plan.published, strict=True)]
    others = " for other targets" if "none for this target" in plan.published[0][0] else ""
    return (
        f"By acceptance published{others}, DFlash drafts give {' to '.join(ends)} with"
        f" {best.sizing.at_load.running} at once, {best.gpu} tp {best.tensor_parallel},"
        f" {plan.request.engine}; for your texts {ask}"
    )


def _ranges(choices: Sequence[BatchChoice]) -> str:
    """`trees to 24, chains to 96, plain beyond`, by requests at once."""
    names = {"plain": "plain", "chain": "chains", "tree": "trees"}
    *ranges, last = shape_ranges(choices)
    if not ranges:
        return f"{names[last.shape]} at every number at once"
    parts = [f"{names[one.shape]} to {one.last}" for one in ranges]
    return ", ".join([*parts, f"{names[last.shape]} beyond"])
