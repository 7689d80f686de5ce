"""Pictures of where the time goes, and of how well the cost model foretold it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from profiler.bench.drawing import (
    GRAY,
    SERIES,
    Picture,
    legend_below,
    name_axes,
    new_figure,
    shown,
    slug,
    tree_size_axis,
)
from profiler.bench.record import Arm
from profiler.bench.series import LEAST_SAMPLES, join_tables, latencies
from profiler.bench.view import View

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STAGES = ("draft", "build", "verify", "accept", "commit")
STAGE_COLOURS = ("#c79a00", "#9b6bd3", "#3a86c8", "#4c9f70", "#d45d9c")
MOST_BANDS = 4
MOST_MODELS = 4


def time_pictures(view: View) -> list[Picture]:
    """Figure 2 (right) of the paper, stage times of all arms, and figure 9(a)."""
    return [*_cycles(view), *_stages(view), *_latency(view)]


def _cycles(view: View) -> list[Picture]:
    title = "Time of a round against tree size"
    if not view.hindsight:
        return [Picture(name="cycle", title=f"{title} (figure 2, right)",
                        missing="add --study sweep for fixed tree sizes")]  # fmt: skip
    return [
        Picture(
            name=f"cycle-{number + 1}-{slug(drafter)}",
            title=f"{title} with {drafter} (figure 2, right)",
            caption="Mean milliseconds of each stage of a round with trees of a fixed number of "
            "nodes, 0 being plain decoding; all rounds of all prompts.",
            draw=lambda drafter=drafter: _draw_cycles(view, drafter),
        )
        for number, drafter in enumerate(view.hindsight)
    ]


def _stages(view: View) -> list[Picture]:
    arms = [arm for arm in view.result.arms if view.figures(arm.name).stage_shares]
    if not arms:
        return [Picture(name="stages", title="Time of a token by stage",
                        missing="no arm of this run timed its stages")]  # fmt: skip
    return [
        Picture(
            name="stages",
            title="Time of a token by stage",
            caption="Milliseconds for each token after the first, by stage of the round. Without "
            "--stage-times an accelerator's work shows in the stage that waits for it.",
            draw=lambda: _draw_stages(view, arms),
        )
    ]


def _latency(view: View) -> list[Picture]:
    pictures = []
    if view.speculating:
        pictures.append(
            Picture(
                name="latency",
                title="Verification time against tree size (figure 9a)",
                caption="Dots: median seconds of the target's forward in all rounds of our arms, "
                f"by nodes and by cached tokens, where there are {LEAST_SAMPLES} rounds or more. "
                "Lines: what the cost model expected before those rounds, where an arm has one.",
                draw=lambda: _draw_latency(view),
            )
        )
    ordered = [*view.main, *(arm for arm in view.speculating if arm not in view.main)]
    models = [arm for arm in ordered if view.figures(arm.name).verify_error is not None]
    if not models:
        title = "Error of the cost model in use"
        return [*pictures, Picture(name="cost-error", title=title, missing="add --policy bastion")]
    return [
        *pictures,
        Picture(
            name="cost-error",
            title="Error of the cost model in use",
            caption="Share of the target's forwards whose time was foretold to within so much of "
            "the measured time. Foretold before each round, from what was known by then.",
            draw=lambda: _draw_errors(view, models[:MOST_MODELS]),
        ),
    ]


def _draw_cycles(view: View, drafter: str) -> Figure:
    figure, axes = new_figure()
    sizes = [size for size in view.hindsight[drafter].sizes if view.figures(size.arm).rounds]
    bottom = [0.0] * len(sizes)
    for stage, colour in zip(STAGES, STAGE_COLOURS, strict=True):
        heights = [1e3 * _stage_s(view, size.arm, stage) / (view.figures(size.arm).rounds or 1)
                   for size in sizes]  # fmt: skip
        axes.bar(range(len(sizes)), heights, 0.7, bottom, color=colour, label=stage)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(range(len(sizes)), [str(size.nodes) for size in sizes])
    axes.grid(False, axis="x")
    name_axes(axes, "nodes of the draft tree", "ms a round")
    legend_below(figure, axes, columns=5)
    return figure


def _draw_stages(view: View, arms: Sequence[Arm]) -> Figure:
    figure, axes = new_figure(1.2 + 0.26 * max(len(arms), 3))
    left = [0.0] * len(arms)
    for stage, colour in zip(STAGES, STAGE_COLOURS, strict=True):
        widths = []
        for arm in arms:
            tokens = sum(one.decoded_tokens for one in view.result.of(arm.name))
            widths.append(1e3 * _stage_s(view, arm.name, stage) / (tokens or 1))
        axes.barh(range(len(arms)), widths, 0.7, left, color=colour, label=stage)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(arms)), [shown(arm.name) for arm in arms])
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    name_axes(axes, "ms a token", "")
    legend_below(figure, axes, columns=5)
    return figure


def _stage_s(view: View, arm: str, stage: str) -> float:
    """Seconds of one stage over all responses of an arm."""
    return math.fsum(one.stages.get(f"{stage}_s", 0.0) for one in view.result.of(arm))


def _draw_latency(view: View) -> Figure:
    figure, axes = new_figure()
    tables = [table for arm in view.speculating if (table := view.rounds(arm.name)) is not None]
    measured = latencies(join_tables(tables))
    foretold = latencies(join_tables([table for table in tables if table.has_model] or tables))
    bands: dict[int, int] = {}
    for point in measured:
        bands[point.context] = bands.get(point.context, 0) + point.rounds
    chosen = sorted(sorted(bands, key=lambda band: -bands[band])[:MOST_BANDS])
    for number, band in enumerate(chosen):
        own = [point for point in measured if point.context == band]
        label = f"{band}\N{EN DASH}{2 * band - 1} cached tokens"
        axes.plot([point.nodes for point in own], [1e3 * point.measured_s for point in own], "o",
                  markersize=4, color=SERIES[number], label=label)  # fmt: skip
        model = [(point.nodes, 1e3 * point.predicted_s) for point in foretold
                 if point.context == band and point.predicted_s is not None]  # fmt: skip
        axes.plot([nodes for nodes, _ in model], [ms for _, ms in model], "-", linewidth=1.2,
                  color=SERIES[number])  # fmt: skip
    tree_size_axis(axes, [0, *(2**power - 1 for power in range(1, 11)
                               if 2**power - 1 <= 2 * max(point.nodes for point in measured))]
                   if measured else [0])  # fmt: skip
    axes.set_ylim(bottom=0)
    name_axes(axes, "nodes of the draft tree", "ms of the target's forward")
    legend_below(figure, axes, columns=2)
    return figure


def _draw_errors(view: View, arms: Sequence[Arm]) -> Figure:
    import numpy as np

    figure, axes = new_figure()
    for number, arm in enumerate(arms):
        table = view.rounds(arm.name)
        if table is None:
            continue
        timed = table.verify_s > 0
        errors = np.sort(np.abs(table.predicted_s[timed] / table.verify_s[timed] - 1))
        shares = np.arange(1, len(errors) + 1) / len(errors)
        keep = np.unique(np.linspace(0, len(errors) - 1, 200).astype(int))
        axes.plot(errors[keep] * 100, shares[keep] * 100, drawstyle="steps-post",
                  color=SERIES[number], label=shown(arm.name))  # fmt: skip
    axes.axhline(50, color=GRAY, linestyle=":", linewidth=1)
    axes.set_xlim(left=0)
    axes.set_ylim(0, 102)
    name_axes(axes, "error of the foretold time, %", "share of forwards, %")
    legend_below(figure, axes, columns=2)
    return figure
