"""Pictures of a plan: cost against the goal for the time per token, and best trees of each GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from costmodel.catalog import resolve_target
from costmodel.planning.request import Goals
from costmodel.planning.result import Option, Plan
from costmodel.planning.search import make_server
from costmodel.planning.servers import OperatingPoint, Server, choose, replicas_for
from costmodel.planning.sources import forward_for
from costmodel.planning.traffic import Traffic
from costmodel.profile.store import ProfileStore
from profiler.report.drawing import (
    GRAY,
    SERIES,
    Picture,
    check_picture,
    finish,
    log_axes,
    new_plot,
    panels,
    plain_number,
    save_figure,
    set_title,
    shown,
    slug,
)
from profiler.report.plan_tables import heading

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GOALS = 60
CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384)
MAP_CONCURRENCIES = (1, 4, 16, 64, 256)
LINES = ("-", "--", ":")
_LIGHT, _DARK = (0.93, 0.95, 0.98), (0.11, 0.33, 0.55)  # colours of no draft and of the largest

Draw = Callable[["Axes"], None]


def plan_pictures(plan: Plan) -> list[Picture]:
    """The pictures of a plan's page: the cost of all options, and a map for each GPU."""
    pictures = [
        Picture(
            name="cost",
            title=f"Cost of {_model(plan)} against the goal",
            caption=f"{_cost_name(plan)} to serve {plan.request.rate:g} requests a second, by the "
            "goal for the mean time per token. A line begins at the shortest time that its option "
            "reaches.",
            draw=lambda: _alone(partial(_draw_costs, plan=plan), legend=2),
        )
    ]
    for number, option in enumerate(_one_a_gpu(plan), start=1):
        pictures.append(
            Picture(
                name=f"trees-{number}-{slug(option.gpu)}",
                title=f"Best draft for {_model(plan)} on {_label(option)}",
                caption="Drafted tokens of the best draft by mean context and requests at once: T "
                "a tree, C a chain, a dash plain decoding. Empty cells do not fit into memory.",
                draw=lambda option=option: _alone(partial(_draw_map, plan=plan, option=option)),
            )
        )
    return pictures


def plot_plan(plan: Plan, path: Path) -> Path:
    """Save all pictures as one file, a panel each: PNG, SVG or PDF by the file's ending.

    Raises InputError for another ending, and where the file cannot be written.
    """
    check_picture(path)
    options = _one_a_gpu(plan)
    figure, grid = panels(1 + len(options), columns=2)
    _draw_costs(grid[0], plan)
    handles, names = grid[0].get_legend_handles_labels()
    if names:
        grid[0].legend(handles, names, fontsize=7)
    grid[0].set_title("cost against the goal", fontsize=9)
    for axes, option in zip(grid[1:], options, strict=True):
        _draw_map(axes, plan, option)
        axes.set_title(f"drafted tokens (T tree, C chain): {_label(option)}", fontsize=9)
    set_title(figure, heading(plan))
    return save_figure(figure, path)


def frontier(plan: Plan, option: Option) -> tuple[list[float], list[float]]:
    """Goals for the time per token in ms, and the cost per hour, or GPUs, of an option at each."""
    request = plan.request
    tpot_s = [point.tpot_s for point in option.points]
    goals_ms: list[float] = []
    costs: list[float] = []
    if not tpot_s:
        return goals_ms, costs
    for goal_s in np.geomspace(min(tpot_s), max(tpot_s), GOALS):
        goals = Goals(tpot_s=float(goal_s) * (1 + 1e-9), ttft_s=request.goals.ttft_s)
        point = choose(option.points, goals)
        if point is None:
            continue
        servers = replicas_for(request.rate, point.requests_per_s, request.utilisation)
        price = request.prices[option.gpu] if _priced(plan) else 1.0
        goals_ms.append(float(goal_s) * 1e3)
        costs.append(servers * option.tensor_parallel * price)
    return goals_ms, costs


def best_points(server: Server, traffic: Traffic) -> dict[tuple[int, int], OperatingPoint]:
    """The best point by (requests at once, mean context), where the cache is large enough."""
    points = {}
    for context in CONTEXTS:
        prompt = max(context - traffic.output_tokens / 2, 1.0)
        long = Traffic(prompt_tokens=prompt, output_tokens=traffic.output_tokens)
        most = server.most_running(long)
        for running in MAP_CONCURRENCIES:
            if running <= most:
                points[running, context] = server.best(long, running)
    return points


def _alone(draw: Draw, legend: int = 0) -> Figure:
    """A figure of one plot, with a legend of so many columns below it."""
    figure, axes = new_plot()
    draw(axes)
    return finish(figure, axes, (axes.get_xlabel(), axes.get_ylabel()), columns=legend)


def _draw_costs(axes: Axes, plan: Plan) -> None:
    for number, option in enumerate(plan.options):
        goals_ms, costs = frontier(plan, option)
        if goals_ms:
            colour = SERIES[number % len(SERIES)]
            style = LINES[number // len(SERIES) % len(LINES)]
            axes.step(goals_ms, costs, style, where="post", color=colour, label=_label(option))
            axes.plot(goals_ms[:1], costs[:1], "o", markersize=3, color=colour)
    if plan.request.goals.tpot_s:
        goal_ms = plan.request.goals.tpot_s * 1e3
        axes.axvline(goal_ms, color=GRAY, linestyle=":", label=f"goal: {plain_number(goal_ms)} ms")
    log_axes(axes, "xy")
    axes.set_xlabel("goal for the time per token, ms", fontsize=9)
    axes.set_ylabel(_cost_name(plan), fontsize=9)


def _draw_map(axes: Axes, plan: Plan, option: Option) -> None:
    request = plan.request
    forward = forward_for(
        request, resolve_target(request.target, hub=True), (option.gpu, option.tensor_parallel),
        ProfileStore(),
    )  # fmt: skip
    server = make_server(request, forward, plan.acceptance)
    points = best_points(server, request.traffic)
    largest = max((point.nodes for point in points.values()), default=0)
    for (running, context), point in points.items():
        x, y = CONTEXTS.index(context), MAP_CONCURRENCIES.index(running)
        share = math.log1p(point.nodes) / math.log1p(largest) if largest else 0.0
        colour = [light + share * (dark - light) for light, dark in zip(_LIGHT, _DARK, strict=True)]
        axes.fill_between([x - 0.48, x + 0.48], y - 0.46, y + 0.46, color=colour, linewidth=0)
        text = {"plain": "\N{EN DASH}", "chain": f"C{point.nodes}"}.get(
            point.shape, f"T{point.nodes}"
        )
        axes.text(x, y, text, ha="center", va="center", fontsize=8,
                  color="white" if share > 0.55 else "#1b1d21")  # fmt: skip
    axes.grid(False)
    axes.set_xlim(-0.5, len(CONTEXTS) - 0.5)
    axes.set_ylim(-0.5, len(MAP_CONCURRENCIES) - 0.5)
    axes.set_xticks(range(len(CONTEXTS)), [plain_number(context) for context in CONTEXTS])
    axes.set_yticks(range(len(MAP_CONCURRENCIES)), [str(b) for b in MAP_CONCURRENCIES])
    axes.set_xlabel("mean context, tokens", fontsize=9)
    axes.set_ylabel("requests at once", fontsize=9)


def _one_a_gpu(plan: Plan) -> list[Option]:
    """The best option of each GPU that can be planned."""
    best: dict[str, Option] = {}
    for option in plan.options:
        if option.points:
            best.setdefault(option.gpu, option)
    return list(best.values())


def _priced(plan: Plan) -> bool:
    return all(gpu in plan.request.prices for gpu in plan.request.gpus)


def _cost_name(plan: Plan) -> str:
    return f"{plan.request.currency} an hour" if _priced(plan) else "GPUs"


def _label(option: Option) -> str:
    """A GPU's name, without the folder of a profile, and the degree above 1."""
    name = shown(Path(option.gpu).stem if "/" in option.gpu else option.gpu)
    return name if option.tensor_parallel == 1 else f"{name}, tp {option.tensor_parallel}"


def _model(plan: Plan) -> str:
    return plan.request.target.rstrip("/").rpartition("/")[2]
