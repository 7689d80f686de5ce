"""How the simulated part of a plan is shown: one row a fleet, and what no fleet holds."""

from __future__ import annotations

import math

from costmodel.capacity.goals import seconds_text
from costmodel.capacity.percentiles import Fleet, Simulated, Spread
from costmodel.capacity.planner import Plan

SIMULATED_COLUMNS = (
    "GPU", "tp", "GPUs", "busy", "at once", "waiting p95 ms", "ttft p50", "p95", "p99 ms",
    "tpot p50", "p95", "p99 ms", "goals", "per hour",
)  # fmt: skip


def simulated_title(plan: Plan) -> str:
    """What was simulated."""
    sampling = plan.request.sampling
    return "" if sampling is None else f"simulated: {sampling.words()}"


def simulated_rows(plan: Plan) -> list[list[str | None]]:
    """The fleet that means ask for; below it the smallest that holds all goals, where it has to
    be larger, or the largest that was tried."""
    rows = []
    for found in plan.simulated:
        fleets = [found.planned, found.enough or found.nearest]
        for fleet in fleets[: 1 if fleets[0] is fleets[1] else 2]:
            if fleet is not None:
                rows.append(_row(plan, found, fleet))
    return rows


def simulated_lines(plan: Plan) -> list[str]:
    """One line for each option that needs more GPUs than its means say, or that none helps."""
    lines = []
    for found in plan.simulated:
        name = f"{found.gpu} tp {found.tensor_parallel}"
        if found.planned is None:
            lines.append(f"{name}: not simulated: {found.problem}")
        elif found.enough is None:
            nearest = found.nearest or found.planned
            lines.append(
                f"{name}: no fleet of up to {found.tried_gpus} GPUs holds"
                f" {', '.join(nearest.missed)}; nearest: {_reached(nearest)}"
            )
        elif found.enough is not found.planned:
            lines.append(
                f"{name}: {found.planned.gpus} GPUs hold the means, but not"
                f" {', '.join(found.planned.missed)}; {found.enough.gpus} hold all goals"
            )
    return lines + _first_of_all(plan)


def _first_of_all(plan: Plan) -> list[str]:
    """One line where another GPU than the plan's best is the one to take for all goals."""
    holding = [found for found in plan.simulated if found.enough is not None]
    first = min(holding, key=_rank, default=None)
    if first is None or first.enough is None or plan.best is None or first.gpu == plan.best.gpu:
        return []
    cost = first.cost_per_hour
    price = "the fewest GPUs" if cost is None else f"the least cost, {cost:.2f} an hour"
    return [f"all goals are held with {price} by {first.enough.gpus} {first.gpu}"]


def _rank(found: Simulated) -> tuple[float, int]:
    cost = found.cost_per_hour
    return (math.inf if cost is None else cost, found.enough.gpus if found.enough else 0)


def _reached(fleet: Fleet) -> str:
    """What the missed goals come to."""
    if fleet.overloaded:
        return "the queue grows"
    words = []
    for name in fleet.missed:
        metric, _, percent = name.partition(".")
        spread: Spread = getattr(fleet, metric)
        words.append(f"{name} {seconds_text(getattr(spread, percent or 'mean').value)}")
    return ", ".join(words)


def _row(plan: Plan, found: Simulated, fleet: Fleet) -> list[str | None]:
    price = plan.request.prices.get(found.gpu)
    if fleet.missed:
        goals: str | None = f"missed: {', '.join(fleet.missed)}"
    else:
        goals = "held" if plan.request.goals else None
    return [
        found.gpu,
        str(found.tensor_parallel),
        str(fleet.gpus),
        f"{fleet.utilisation:.0%}",
        f"{fleet.running:.1f}",
        _cell(fleet.waiting, "p95", fleet),
        *(_cell(fleet.ttft, percent, fleet) for percent in ("p50", "p95", "p99")),
        *(_cell(fleet.tpot, percent, fleet, ".1f") for percent in ("p50", "p95", "p99")),
        goals,
        None if price is None else f"{fleet.gpus * price:.2f}",
    ]


def _cell(spread: Spread | None, percent: str, fleet: Fleet, form: str = ".0f") -> str | None:
    """A percentile in ms; of p95 also the interval. A queue that grows has none."""
    if spread is None:
        return None
    if fleet.overloaded:
        return "grows"
    value = getattr(spread, percent)
    middle, low = f"{value.value * 1e3:{form}}", f"{value.low * 1e3:{form}}"
    if percent != "p95":
        return middle
    high = "grows" if value.high is None else f"{value.high * 1e3:{form}}"
    return middle if low == middle == high else f"{middle} ({low} to {high})"
