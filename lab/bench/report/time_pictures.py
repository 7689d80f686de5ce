"""Pictures of stage times, and of predicted against measured forward times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from lab.bench.analysis.round_groups import LEAST_SAMPLES, join_tables, latencies
from lab.bench.analysis.summary import ResultFigures
from lab.bench.record import Arm
from lab.bench.report.drawing import swept_pictures
from profiler.report.drawing import (
    GRAY,
    SERIES,
    Picture,
    finish,
    new_plot,
    shown,
    tree_size_axis,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STAGES = ("draft", "build", "verify", "accept", "commit")
STAGE_COLOURS = ("#c79a00", "#9b6bd3", "#3a86c8", "#4c9f70", "#d45d9c")
MOST_BANDS = 4  # of contexts in one picture
MOST_MODELS = 4  # cost models in one picture


def time_pictures(figures: ResultFigures) -> list[Picture]:
    """Figures 2 (right) and 9(a) of the BASTION paper, and the stage times of all arms."""
    return [*_cycles(figures), *_stages(figures), *_latency(figures)]


def _cycles(figures: ResultFigures) -> list[Picture]:
    return swept_pictures(
        figures,
        "cycle",
        ("Time of a round against tree size", "(figure 2, right)"),
        "Mean milliseconds of each stage of a round with trees of a fixed number of "
        "nodes, 0 being plain decoding; all rounds of all prompts.",
        _draw_cycles,
    )


def _stages(figures: ResultFigures) -> list[Picture]:
    arms = [arm for arm in figures.result.arms if figures.of(arm.name).stage_shares]
    if not arms:
        return [Picture(name="stages", title="Time of a token by stage",
                        missing="no arm of this run timed its stages")]  # fmt: skip
    return [
        Picture(
            name="stages",
            title="Time of a token by stage",
            caption="Milliseconds for each token after the first, by stage of the round. Without "
            "--stage-times an accelerator's work shows in the stage that waits for it.",
            draw=lambda: _draw_stages(figures, arms),
        )
    ]


def _latency(figures: ResultFigures) -> list[Picture]:
    pictures = []
    if figures.speculating:
        pictures.append(
            Picture(
                name="latency",
                title="Verification time against tree size (figure 9a)",
                caption="Dots: median seconds of the target's forward in all rounds of our arms, "
                f"by nodes and by cached tokens, where there are {LEAST_SAMPLES} rounds or more. "
                "Lines: what the cost model expected before those rounds, where an arm has one.",
                draw=lambda: _draw_latency(figures),
            )
        )
    ordered = [*figures.main, *(arm for arm in figures.speculating if arm not in figures.main)]
    models = [arm for arm in ordered if figures.of(arm.name).verify_error is not None]
    errors = Picture(
        name="cost-error",
        title="Error of the cost model in use",
        caption="Share of the target's forwards whose time was predicted to within this error of "
        "the measured time. Each prediction was made before its round.",
        draw=(lambda: _draw_errors(figures, models[:MOST_MODELS])) if models else None,
        missing="" if models else "add --policy bastion",
    )
    return [*pictures, errors]


def _draw_cycles(figures: ResultFigures, drafter: str) -> Figure:
    plot, axes = new_plot()
    sizes = [size for size in figures.hindsight[drafter].sizes if figures.of(size.arm).rounds]
    bottom = [0.0] * len(sizes)
    for stage, colour in zip(STAGES, STAGE_COLOURS, strict=True):
        heights = [1e3 * _stage_s(figures, size.arm, stage) / (figures.of(size.arm).rounds or 1)
                   for size in sizes]  # fmt: skip
        axes.bar(range(len(sizes)), heights, 0.7, bottom, color=colour, label=stage)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(range(len(sizes)), [str(size.nodes) for size in sizes])
    axes.grid(False, axis="x")
    return finish(plot, axes, ("nodes of the draft tree", "ms a round"), columns=5)


def _draw_stages(figures: ResultFigures, arms: Sequence[Arm]) -> Figure:
    plot, axes = new_plot(1.2 + 0.26 * max(len(arms), 3))
    left = [0.0] * len(arms)
    for stage, colour in zip(STAGES, STAGE_COLOURS, strict=True):
        widths = []
        for arm in arms:
            tokens = sum(one.decoded_tokens for one in figures.result.of(arm.name))
            widths.append(1e3 * _stage_s(figures, arm.name, stage) / (tokens or 1))
        axes.barh(range(len(arms)), widths, 0.7, left, color=colour, label=stage)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(arms)), [shown(arm.name) for arm in arms])
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    return finish(plot, axes, ("ms a token", ""), columns=5)


def _stage_s(figures: ResultFigures, arm: str, stage: str) -> float:
    """Seconds of one stage over all responses of an arm."""
    return math.fsum(one.stages.get(f"{stage}_s", 0.0) for one in figures.result.of(arm))


def _draw_latency(figures: ResultFigures) -> Figure:
    plot, axes = new_plot()
    by_arm = [figures.rounds(arm.name) for arm in figures.speculating]
    tables = [table for table in by_arm if table is not None]
    measured = latencies(join_tables(tables))
    predicted = latencies(join_tables([table for table in tables if table.has_model] or tables))
    bands: dict[int, int] = {}
    for point in measured:
        bands[point.context] = bands.get(point.context, 0) + point.rounds
    chosen = sorted(sorted(bands, key=lambda band: -bands[band])[:MOST_BANDS])
    for number, band in enumerate(chosen):
        points = [point for point in measured if point.context == band]
        label = f"{band}\N{EN DASH}{2 * band - 1} cached tokens"
        axes.plot([point.nodes for point in points], [1e3 * point.measured_s for point in points],
                  "o", markersize=4, color=SERIES[number], label=label)  # fmt: skip
        model = [(point.nodes, 1e3 * point.predicted_s) for point in predicted
                 if point.context == band and point.predicted_s is not None]  # fmt: skip
        axes.plot([nodes for nodes, _ in model], [ms for _, ms in model], "-", linewidth=1.2,
                  color=SERIES[number])  # fmt: skip
    tree_size_axis(axes, [0, *(2**power - 1 for power in range(1, 11)
                               if 2**power - 1 <= 2 * max(point.nodes for point in measured))]
                   if measured else [0])  # fmt: skip
    axes.set_ylim(bottom=0)
    return finish(plot, axes, ("nodes of the draft tree", "ms of the target's forward"), columns=2)


def _draw_errors(figures: ResultFigures, arms: Sequence[Arm]) -> Figure:
    plot, axes = new_plot()
    for number, arm in enumerate(arms):
        table = figures.rounds(arm.name)
        if table is None:
            continue
        timed = table.verify_s > 0
        errors = np.sort(np.abs(table.predicted_s[timed] / table.verify_s[timed] - 1))
        shares = np.arange(1, len(errors) + 1) / len(errors)
        drawn = np.unique(np.linspace(0, len(errors) - 1, 200).astype(int))
        axes.plot(errors[drawn] * 100, shares[drawn] * 100, drawstyle="steps-post",
                  color=SERIES[number], label=shown(arm.name))  # fmt: skip
    axes.axhline(50, color=GRAY, linestyle=":", linewidth=1)
    axes.set_xlim(left=0)
    axes.set_ylim(0, 102)
    return finish(plot, axes, ("error of the predicted time, %", "share of forwards, %"), columns=2)
