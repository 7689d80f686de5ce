"""Pictures of the arms' speed: against plain decoding, each other, and the best fixed sizes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from lab.bench.analysis.ratios import Ratio
from lab.bench.analysis.round_groups import prompt_ratios
from lab.bench.analysis.summary import ResultFigures
from lab.bench.record import PLAIN, Arm
from lab.bench.report.drawing import colour_of, swept_pictures
from lab.bench.report.tables import number_text
from profiler.report.drawing import (
    GRAY,
    SERIES,
    Picture,
    finish,
    new_plot,
    shown,
    slug,
    tree_size_axis,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INTERVALS = "Bars are 95 % bootstrap intervals over prompts; without a bar there are too few."
_TIMES = "times as fast as plain decoding"
MOST_PAIRED = 3  # arms with a picture by prompt


def speed_pictures(figures: ResultFigures) -> list[Picture]:
    """Every arm against plain decoding, and adaptive arms prompt by prompt."""
    every = [arm for arm in figures.result.arms if arm.name != PLAIN]
    if not every:
        return [Picture(name="speedups", title="Speed of all arms",
                        missing="only plain decoding was run; add arms with --policy")]  # fmt: skip
    pictures = [
        Picture(
            name="speedups",
            title="Speed of all arms",
            caption="Tokens per second from the first token on, over those of plain decoding on "
            f"the same prompts. {_INTERVALS}",
            draw=lambda: _draw_arms(figures, every),
        )
    ]
    adaptive = figures.with_policy("bastion") or figures.main
    for number, arm in enumerate(adaptive[:MOST_PAIRED]):
        pictures.append(
            Picture(
                name=f"prompts-{number + 1}-{slug(arm.name)}",
                title=f"{arm.name}, prompt by prompt",
                caption="Each dot is one prompt: its tokens per second over those of plain "
                "decoding, from the first token on. A bar spans its repeats. The band is the "
                "95 % interval of all prompts together, the dashed line their pooled ratio.",
                draw=lambda arm=arm: _draw_prompts(figures, arm),
            )
        )
    return pictures


def sweep_pictures(figures: ResultFigures) -> list[Picture]:
    """Figure 4 of the BASTION paper: fixed tree sizes, the best in hindsight, and the policies."""
    return swept_pictures(
        figures,
        "sweep",
        ("Speed against tree size", "(the paper's figure 4)"),
        "Line: trees of a fixed number of nodes, 0 being plain decoding. Stars: other "
        "policies, at the mean of the nodes they verified. Dashed: the best size of each "
        "prompt set, picked knowing the outcome. Decoding alone, all prompts pooled. "
        f"{_INTERVALS}",
        _draw_sweep,
    )


def study_pictures(figures: ResultFigures) -> list[Picture]:
    """Figures 8(b) and 9(b) of the BASTION paper, and DynaTree's ablation."""
    return [
        *_study(figures, "shape", "Tree shapes of equal size (the paper's figure 8)",
                "Beam search and best-first growth with as many nodes each; a chain, where one was "
                "run, is there as a smaller tree without branches."),
        *_study(figures, "estimator", "Latency estimators (the paper's figure 9b)",
                "The same policy over a cost model that is static, corrected by measured "
                "times (ema+calib), or made of measured times alone (ema)."),
        *_study(figures, "dynatree", "DynaTree's ablation",
                "Fixed trees, and DynaTree without and with its history adaptation."),
    ]  # fmt: skip


def _study(figures: ResultFigures, study: str, title: str, explanation: str) -> list[Picture]:
    arms = [arm for arm in figures.speculating if study in arm.studies]
    if not arms:
        return [Picture(name=study, title=title, missing=f"add --study {study}")]
    if study == "shape":
        drafters = {arm.drafter for arm in arms}
        arms = [*(arm for arm in figures.with_policy("chain") if arm.drafter in drafters), *arms]
    caption = (
        f"{explanation} Dots: decoding alone over plain decoding, all prompts pooled; the numbers "
        f"are tokens per verification and mean nodes per round. {_INTERVALS}"
    )
    draw = partial(_draw_study, figures, arms)
    return [Picture(name=study, title=title, caption=caption, draw=draw)]


def _draw_arms(figures: ResultFigures, arms: Sequence[Arm]) -> Figure:
    plot, axes = _rows_plot(len(arms))
    _draw_ratios(axes, figures, arms)
    return finish(plot, axes, (_TIMES, ""))


def _draw_study(figures: ResultFigures, arms: Sequence[Arm]) -> Figure:
    plot, axes = _rows_plot(len(arms), 0.42)
    _draw_ratios(axes, figures, arms)
    labels = []
    for arm in arms:
        one = figures.of(arm.name)
        tokens = number_text(one.tokens_per_verification, ".2f") or "-"
        nodes = number_text(one.nodes_mean, ".1f") or "-"
        labels.append(f"{shown(arm.name)}\n{tokens} tokens, {nodes} nodes")
    axes.set_yticks(range(len(arms)), labels)
    return finish(plot, axes, (_TIMES, ""))


def _rows_plot(rows: int, row_in: float = 0.26) -> tuple[Figure, Axes]:
    """A plot with one row for each arm, the first on top."""
    plot, axes = new_plot(0.8 + row_in * max(rows, 3))
    axes.set_ylim(rows - 0.4, -0.6)
    axes.grid(False, axis="y")
    return plot, axes


def _draw_ratios(axes: Axes, figures: ResultFigures, arms: Sequence[Arm]) -> None:
    axes.set_yticks(range(len(arms)), [shown(arm.name) for arm in arms])
    axes.axvline(1.0, color=GRAY, linestyle=":", linewidth=1)
    for row, arm in enumerate(arms):
        ratio = figures.of(arm.name).over_plain
        if ratio is not None:
            axes.errorbar(ratio.pooled, row, xerr=_bars(ratio), fmt="o", markersize=5,
                          color=colour_of(arm.policy), elinewidth=1.6, capsize=2)  # fmt: skip
    axes.set_xlim(left=min(0.0, axes.get_xlim()[0]))


def _draw_prompts(figures: ResultFigures, arm: Arm) -> Figure:
    plot, axes = new_plot()
    ratios = prompt_ratios(figures.result, arm.name, PLAIN)
    pooled = figures.of(arm.name).over_plain
    if pooled is not None:
        axes.axhline(pooled.pooled, color="black", linestyle="--", linewidth=1)
        if pooled.low is not None and pooled.high is not None:
            axes.axhspan(pooled.low, pooled.high, color=GRAY, alpha=0.2, linewidth=0)
    axes.axhline(1.0, color=GRAY, linestyle=":", linewidth=1)
    for number, name in enumerate(figures.result.sets):
        inside = [
            (place, ratio)
            for place, (prompt, ratio) in enumerate(ratios, start=1)
            if prompt.set == name
        ]
        if inside:
            axes.errorbar(
                [place for place, _ in inside],
                [ratio.pooled for _, ratio in inside],
                yerr=[
                    [ratio.pooled - ratio.least for _, ratio in inside],
                    [ratio.most - ratio.pooled for _, ratio in inside],
                ],
                fmt="o", markersize=4, elinewidth=1, color=SERIES[number % len(SERIES)],
                label=shown(name),
            )  # fmt: skip
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.xaxis.get_major_locator().set_params(integer=True)
    return finish(plot, axes, ("prompts, slowest first", _TIMES), columns=3)


def _draw_sweep(figures: ResultFigures, drafter: str) -> Figure:
    plot, axes = new_plot()
    sweep = figures.hindsight[drafter]
    sizes = [size.nodes for size in sweep.sizes]
    _draw_sizes(axes, sizes, [figures.of(size.arm).over_plain for size in sweep.sizes])
    plain = sweep.sizes[0].tokens_per_s
    axes.axhline(sweep.set_tokens_per_s / plain, color="#c79a00", linestyle="--", linewidth=1.4,
                 label="best size per set, in hindsight")  # fmt: skip
    for arm in figures.with_drafter(drafter):
        one = figures.of(arm.name)
        if arm.nodes is not None or arm.variant or one.over_plain is None:
            continue
        colour = colour_of(arm.policy)
        axes.errorbar(one.nodes_mean, one.over_plain.pooled, yerr=_bars(one.over_plain), fmt="*",
                      markersize=11, color=colour, elinewidth=1.2, zorder=3,
                      label=shown(arm.policy))  # fmt: skip
    tree_size_axis(axes, sizes)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    return finish(plot, axes, ("nodes of the draft tree", _TIMES), columns=2)


def _draw_sizes(axes: Axes, sizes: Sequence[int], ratios: Sequence[Ratio | None]) -> None:
    """The line of fixed sizes. Plain decoding is 1 by definition and has no interval."""
    points = [(size, one) for size, one in zip(sizes, ratios, strict=True) if one is not None]
    colour = colour_of("fixed")
    axes.plot([size for size, _ in points], [one.pooled for _, one in points], "o-", markersize=4,
              color=colour, label="fixed size")  # fmt: skip
    for size, one in points:
        if size > 0:
            axes.errorbar(size, one.pooled, yerr=_bars(one), color=colour, elinewidth=1.2)


def _bars(ratio: Ratio) -> list[list[float]] | None:
    """Distances to the ends of the interval, as matplotlib's error bars; None without one."""
    if ratio.low is None or ratio.high is None:
        return None
    # A skewed interval of few prompts may lie on one side of the pooled ratio.
    return [[max(ratio.pooled - ratio.low, 0.0)], [max(ratio.high - ratio.pooled, 0.0)]]
