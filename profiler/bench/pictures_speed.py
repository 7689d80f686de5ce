"""Pictures of how fast the arms are: against plain decoding, each other and hindsight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from profiler.bench.analysis import Ratio
from profiler.bench.cells import number_text
from profiler.bench.drawing import (
    GRAY,
    SERIES,
    Picture,
    colour_of,
    legend_below,
    name_axes,
    new_figure,
    shown,
    slug,
    tree_size_axis,
)
from profiler.bench.record import PLAIN, Arm
from profiler.bench.series import prompt_ratios
from profiler.bench.view import View

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INTERVALS = "Bars are 95 % bootstrap intervals over prompts; without a bar there are too few."
_TIMES = "times as fast as plain decoding"
MOST_PAIRED = 3


def speed_pictures(view: View) -> list[Picture]:
    """Every arm against plain decoding, and prompt by prompt."""
    every = [arm for arm in view.result.arms if arm.name != PLAIN]
    if not every:
        return [Picture(name="speedups", title="Speed of all arms",
                        missing="only plain decoding was run; add arms with --policy")]  # fmt: skip
    pictures = [
        Picture(
            name="speedups",
            title="Speed of all arms",
            caption="Tokens per second from the first token on, over those of plain decoding on "
            f"the same prompts. {_INTERVALS}",
            draw=lambda: _draw_arms(view, every),
        )
    ]
    adaptive = view.named("bastion") or view.main
    for number, arm in enumerate(adaptive[:MOST_PAIRED]):
        pictures.append(
            Picture(
                name=f"prompts-{number + 1}-{slug(arm.name)}",
                title=f"{arm.name}, prompt by prompt",
                caption="Each dot is one prompt: its tokens per second over those of plain "
                "decoding, from the first token on. A bar spans its repeats. The band is the "
                "95 % interval of all prompts together, the dashed line their pooled ratio.",
                draw=lambda arm=arm: _draw_prompts(view, arm),
            )
        )
    return pictures


def sweep_pictures(view: View) -> list[Picture]:
    """Figure 4 of the paper: fixed tree sizes, what hindsight would pick, and the policies."""
    if not view.hindsight:
        return [Picture(name="sweep", title="Speed against tree size (the paper's figure 4)",
                        missing="add --study sweep for fixed tree sizes")]  # fmt: skip
    return [
        Picture(
            name=f"sweep-{number + 1}-{slug(drafter)}",
            title=f"Speed against tree size with {drafter} (the paper's figure 4)",
            caption="Line: trees of a fixed number of nodes, 0 being plain decoding. Stars: other "
            "policies, at the mean of the nodes they verified. Dashed: the best size of each "
            "prompt set, picked knowing the outcome. Decoding alone, all prompts pooled. "
            f"{_INTERVALS}",
            draw=lambda drafter=drafter: _draw_sweep(view, drafter),
        )
        for number, drafter in enumerate(view.hindsight)
    ]


def study_pictures(view: View) -> list[Picture]:
    """Figures 8(b) and 9(b) of the paper, and DynaTree's ablation: few arms side by side."""
    return [
        *_study(view, "shape", "Tree shapes of equal size (the paper's figure 8)",
                "Beam search and best-first growth with as many nodes each; a chain, where one was "
                "run, is there as a smaller tree without branches."),
        *_study(view, "estimator", "Latency estimators (the paper's figure 9b)",
                "The same policy over a cost model that is static, corrected by measured "
                "times (ema+calib), or made of measured times alone (ema)."),
        *_study(view, "dynatree", "DynaTree's ablation",
                "Fixed trees, and DynaTree without and with its history adaptation."),
    ]  # fmt: skip


def _study(view: View, study: str, title: str, what: str) -> list[Picture]:
    arms = [arm for arm in view.speculating if study in arm.studies]
    if not arms:
        return [Picture(name=study, title=title, missing=f"add --study {study}")]
    if study == "shape":
        drafters = {arm.drafter for arm in arms}
        arms = [*(arm for arm in view.named("chain") if arm.drafter in drafters), *arms]
    caption = (
        f"{what} Dots: decoding alone over plain decoding, all prompts pooled; the numbers are "
        f"tokens per verification and mean nodes per round. {_INTERVALS}"
    )
    return [Picture(name=study, title=title, caption=caption, draw=lambda: _draw_study(view, arms))]


def _draw_arms(view: View, arms: Sequence[Arm]) -> Figure:
    figure, axes = _rows_figure(len(arms))
    _draw_ratios(axes, view, arms)
    name_axes(axes, _TIMES, "")
    return figure


def _draw_study(view: View, arms: Sequence[Arm]) -> Figure:
    figure, axes = _rows_figure(len(arms), 0.42)
    _draw_ratios(axes, view, arms)
    labels = []
    for arm in arms:
        own = view.figures(arm.name)
        kept = number_text(own.tokens_per_verification, ".2f") or "-"
        nodes = "-" if own.nodes_mean is None else f"{own.nodes_mean:.1f}"
        labels.append(f"{shown(arm.name)}\n{kept} tokens, {nodes} nodes")
    axes.set_yticks(range(len(arms)), labels)
    name_axes(axes, _TIMES, "")
    return figure


def _rows_figure(rows: int, row_in: float = 0.26) -> tuple[Figure, Axes]:
    """A plot of one line an arm, the first on top."""
    figure, axes = new_figure(0.8 + row_in * max(rows, 3))
    axes.set_ylim(rows - 0.4, -0.6)
    axes.grid(False, axis="y")
    return figure, axes


def _draw_ratios(axes: Axes, view: View, arms: Sequence[Arm]) -> None:
    axes.set_yticks(range(len(arms)), [shown(arm.name) for arm in arms])
    axes.axvline(1.0, color=GRAY, linestyle=":", linewidth=1)
    for row, arm in enumerate(arms):
        ratio = view.figures(arm.name).over_plain
        if ratio is not None:
            axes.errorbar(ratio.pooled, row, xerr=_bars(ratio), fmt="o", markersize=5,
                          color=colour_of(arm.policy), elinewidth=1.6, capsize=2)  # fmt: skip
    axes.set_xlim(left=min(0.0, axes.get_xlim()[0]))


def _draw_prompts(view: View, arm: Arm) -> Figure:
    figure, axes = new_figure()
    ratios = prompt_ratios(view.result, arm.name, PLAIN)
    pooled = view.figures(arm.name).over_plain
    if pooled is not None:
        axes.axhline(pooled.pooled, color="black", linestyle="--", linewidth=1)
        if pooled.low is not None and pooled.high is not None:
            axes.axhspan(pooled.low, pooled.high, color=GRAY, alpha=0.2, linewidth=0)
    axes.axhline(1.0, color=GRAY, linestyle=":", linewidth=1)
    for number, name in enumerate(view.result.sets):
        own = [(place, one) for place, one in enumerate(ratios, start=1) if one.set == name]
        if own:
            axes.errorbar(
                [place for place, _ in own],
                [one.ratio for _, one in own],
                yerr=[
                    [one.ratio - one.least for _, one in own],
                    [one.most - one.ratio for _, one in own],
                ],
                fmt="o", markersize=4, elinewidth=1, color=SERIES[number % len(SERIES)],
                label=shown(name),
            )  # fmt: skip
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.xaxis.get_major_locator().set_params(integer=True)
    name_axes(axes, "prompts, slowest first", _TIMES)
    legend_below(figure, axes)
    return figure


def _draw_sweep(view: View, drafter: str) -> Figure:
    figure, axes = new_figure()
    sweep = view.hindsight[drafter]
    sizes = [size.nodes for size in sweep.sizes]
    _draw_sizes(axes, sizes, [view.figures(size.arm).over_plain for size in sweep.sizes])
    plain = sweep.sizes[0].tokens_per_s
    axes.axhline(sweep.set_tokens_per_s / plain, color="#c79a00", linestyle="--", linewidth=1.4,
                 label="best size per set, in hindsight")  # fmt: skip
    for arm in view.with_drafter(drafter):
        own = view.figures(arm.name)
        if arm.nodes is not None or arm.variant or own.over_plain is None:
            continue
        colour = colour_of(arm.policy)
        axes.errorbar(own.nodes_mean, own.over_plain.pooled, yerr=_bars(own.over_plain), fmt="*",
                      markersize=11, color=colour, elinewidth=1.2, zorder=3,
                      label=shown(arm.policy))  # fmt: skip
    tree_size_axis(axes, sizes)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    name_axes(axes, "nodes of the draft tree", _TIMES)
    legend_below(figure, axes, columns=2)
    return figure


def _draw_sizes(axes: Axes, sizes: Sequence[int], ratios: Sequence[Ratio | None]) -> None:
    """The line of fixed sizes; plain decoding is 1 by definition and has no interval."""
    known = [(size, one) for size, one in zip(sizes, ratios, strict=True) if one is not None]
    colour = colour_of("fixed")
    axes.plot([size for size, _ in known], [one.pooled for _, one in known], "o-", markersize=4,
              color=colour, label="fixed size")  # fmt: skip
    for size, one in known:
        if size > 0:
            axes.errorbar(size, one.pooled, yerr=_bars(one), color=colour, elinewidth=1.2)


def _bars(ratio: Ratio) -> list[list[float]] | None:
    """What matplotlib takes as error bars; None without an interval."""
    if ratio.low is None or ratio.high is None:
        return None
    # A skewed interval of few prompts may lie on one side of the pooled ratio.
    return [[max(ratio.pooled - ratio.low, 0.0)], [max(ratio.high - ratio.pooled, 0.0)]]
