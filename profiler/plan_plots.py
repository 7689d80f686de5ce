"""Pictures of a plan: cost against the goal, and the best tree size."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from costmodel.capacity.goals import Goals
from costmodel.capacity.lookup import find_plan_target
from costmodel.capacity.operating import CONCURRENCIES, Server, Traffic, replicas_for
from costmodel.capacity.planner import Plan, make_server, steps_for
from costmodel.capacity.sizing import choose
from costmodel.registry import ProfileStore
from profiler.report import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GOALS = 40
CONTEXTS = (256, 512, 1024, 2048, 4096, 8192, 16384)
MAP_CONCURRENCIES = tuple(b for b in CONCURRENCIES if b in (1, 2, 4, 8, 16, 32, 64, 128, 256))


def plot_plan(plan: Plan, path: Path) -> Path:
    """Both pictures side by side as one PNG. Raises InputError where it cannot be written."""
    return save_figure(_figure(plan), path)


def plan_png(plan: Plan) -> str:
    """The same PNG in base64, to be put into a page."""
    picture = io.BytesIO()
    _figure(plan).savefig(picture, dpi=110, format="png")
    return base64.b64encode(picture.getvalue()).decode("ascii")


def frontier(plan: Plan, index: int) -> tuple[list[float], list[float]]:
    """(goals for the time per token in ms, cost an hour or GPUs) of one option, no gaps."""
    option, request = plan.options[index], plan.request
    tpot_s = [point.tpot_s for point in option.points]
    found: tuple[list[float], list[float]] = ([], [])
    if not tpot_s:
        return found
    for goal_s in np.geomspace(min(tpot_s), max(tpot_s), GOALS):
        goals = Goals(tpot_s=float(goal_s) * (1 + 1e-9), ttft_s=request.goals.ttft_s)
        point = choose(option.points, goals)
        if point is None:
            continue
        servers = replicas_for(request.rate, point.requests_per_s, request.utilisation)
        gpus = servers * option.tensor_parallel
        found[0].append(float(goal_s) * 1e3)
        found[1].append(gpus * request.prices.get(option.gpu, 1.0))
    return found


def tree_sizes(server: Server, traffic: Traffic) -> np.ndarray:
    """Best nodes [concurrencies, contexts]; NaN where the cache does not hold so much."""
    sizes = np.full((len(MAP_CONCURRENCIES), len(CONTEXTS)), np.nan)
    for j, context in enumerate(CONTEXTS):
        long = Traffic(
            prompt_tokens=max(context - traffic.output_tokens / 2, 1.0),
            output_tokens=traffic.output_tokens,
        )
        most = server.most_running(long)
        for i, running in enumerate(MAP_CONCURRENCIES):
            if running <= most:
                sizes[i, j] = server.best(long, running).nodes
    return sizes


def _figure(plan: Plan) -> Figure:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_frontiers(left, plan)
    _draw_sizes(figure, right, plan)
    return figure


def _draw_frontiers(axis: Axes, plan: Plan) -> None:
    priced = all(gpu in plan.request.prices for gpu in plan.request.gpus)
    for index, option in enumerate(plan.options):
        goals_ms, cost = frontier(plan, index)
        if goals_ms:
            label = f"{option.gpu}, tp {option.tensor_parallel}"
            axis.step(goals_ms, cost, where="post", label=label)
    if plan.request.goals.tpot_s:
        axis.axvline(plan.request.goals.tpot_s * 1e3, color="gray", linestyle=":", label="goal")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("goal: ms a token")
    axis.set_ylabel("cost an hour" if priced else "GPUs (times price where there is one)")
    axis.set_title(f"{plan.request.rate:g} requests/s", fontsize=10)
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[1]:
        axis.legend(fontsize=8)


def _draw_sizes(figure: Figure, axis: Axes, plan: Plan) -> None:
    best = next((option for option in plan.options if option.points), None)
    if best is None:
        axis.set_axis_off()
        return
    request = plan.request
    target = find_plan_target(request.target)
    steps = steps_for(request, target, (best.gpu, best.tensor_parallel), ProfileStore())
    sizes = tree_sizes(make_server(request, steps, plan.acceptance), request.traffic)
    image = axis.imshow(np.log2(sizes + 1), origin="lower", aspect="auto", cmap="viridis")
    for i, j in np.argwhere(~np.isnan(sizes)):
        axis.text(j, i, f"{sizes[i, j]:.0f}", ha="center", va="center", color="white", fontsize=8)
    axis.set_xticks(range(len(CONTEXTS)), [str(context) for context in CONTEXTS])
    axis.set_yticks(range(len(MAP_CONCURRENCIES)), [str(b) for b in MAP_CONCURRENCIES])
    axis.set_xlabel("mean context, tokens")
    axis.set_ylabel("requests at once")
    axis.set_title(f"best drafted nodes, {best.gpu}, tp {best.tensor_parallel}", fontsize=10)
    figure.colorbar(image, ax=axis, label="log2(rows)")
