"""The two pictures of a benchmark: all arms against plain decoding, and speed by tree size."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from lab.bench.analysis.ratios import Ratio
from lab.bench.analysis.summary import ResultFigures
from lab.bench.record import PLAIN, Arm
from profiler.report.drawing import GRAY, Picture, finish, new_plot, shown, slug, tree_size_axis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    "bastion": "#e4572e",
    "chain": "#3a86c8",
    "fixed": "#4c9f70",
    "beam": "#9b6bd3",
    "static-tree": "#b07d62",
    "dynatree": "#c79a00",
}
INTERVALS = "Bars are 95 % bootstrap intervals over prompts; without a bar there are too few."
TIMES = "times as fast as plain decoding"


def pictures(figures: ResultFigures) -> list[Picture]:
    """The speed of all arms, and the sweep of each drafter (figure 4 of the BASTION paper)."""
    arms = [arm for arm in figures.result.arms if arm.name != PLAIN]
    speed = Picture(
        name="speedups",
        title="Speed of all arms",
        caption="Tokens per second from the first token on, over those of plain decoding on the "
        f"same prompts. {INTERVALS}",
        draw=partial(_draw_arms, figures, arms) if arms else None,
        missing="" if arms else "only plain decoding was run; add arms with --policy",
    )
    sweeps = [
        Picture(
            name=f"sweep-{number}-{slug(drafter)}",
            title=f"Speed against tree size with {drafter}",
            caption="Line: trees of a fixed number of nodes, 0 being plain decoding. Stars: other "
            "policies, at the mean of the nodes they verified. Dashed: the best size of each "
            f"prompt set, picked knowing the outcome. {INTERVALS}",
            draw=partial(_draw_sweep, figures, drafter),
        )
        for number, drafter in enumerate(figures.hindsight, start=1)
    ]
    missing = "add --study sweep for fixed tree sizes"
    return [speed, *(sweeps or [Picture(name="sweep", title="Tree sizes", missing=missing)])]


def _draw_arms(figures: ResultFigures, arms: Sequence[Arm]) -> Figure:
    plot, axes = new_plot(0.8 + 0.26 * max(len(arms), 3))
    axes.set_ylim(len(arms) - 0.4, -0.6)
    axes.grid(False, axis="y")
    axes.set_yticks(range(len(arms)), [shown(arm.name) for arm in arms])
    axes.axvline(1.0, color=GRAY, linestyle=":", linewidth=1)
    for row, arm in enumerate(arms):
        ratio = figures.of(arm.name).over_plain
        if ratio is not None:
            axes.errorbar(ratio.pooled, row, xerr=_bars(ratio), fmt="o", markersize=5,
                          color=colour_of(arm.policy), elinewidth=1.6, capsize=2)  # fmt: skip
    axes.set_xlim(left=min(0.0, axes.get_xlim()[0]))
    return finish(plot, axes, (TIMES, ""))


def _draw_sweep(figures: ResultFigures, drafter: str) -> Figure:
    plot, axes = new_plot()
    sweep = figures.hindsight[drafter]
    points = [(size.nodes, ratio) for size in sweep.sizes
              if (ratio := figures.of(size.arm).over_plain) is not None]  # fmt: skip
    axes.plot([nodes for nodes, _ in points], [ratio.pooled for _, ratio in points], "o-",
              markersize=4, color=COLOURS["fixed"], label="fixed size")  # fmt: skip
    for nodes, ratio in points:
        if nodes > 0:  # plain decoding is 1 by definition
            axes.errorbar(nodes, ratio.pooled, yerr=_bars(ratio), color=COLOURS["fixed"],
                          elinewidth=1.2)  # fmt: skip
    best = sweep.set_tokens_per_s / sweep.sizes[0].tokens_per_s
    axes.axhline(best, color="#c79a00", linestyle="--", label="best size per set, in hindsight")
    for arm in figures.speculating:
        one = figures.of(arm.name)
        if arm.drafter != drafter or arm.nodes is not None or arm.variant or not one.over_plain:
            continue
        axes.errorbar(one.nodes_mean, one.over_plain.pooled, yerr=_bars(one.over_plain), fmt="*",
                      markersize=11, color=colour_of(arm.policy), elinewidth=1.2, zorder=3,
                      label=shown(arm.policy))  # fmt: skip
    tree_size_axis(axes, [size.nodes for size in sweep.sizes])
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    return finish(plot, axes, ("nodes of the draft tree", TIMES), columns=2)


def _bars(ratio: Ratio) -> list[list[float]] | None:
    """Distances to the ends of the interval, as matplotlib's error bars; None without one."""
    if ratio.low is None or ratio.high is None:
        return None
    # A skewed interval of few prompts may lie on one side of the pooled ratio.
    return [[max(ratio.pooled - ratio.low, 0.0)], [max(ratio.high - ratio.pooled, 0.0)]]


def colour_of(policy: str) -> str:
    """The colour of a policy's family; gray for plain decoding and peers."""
    return COLOURS.get(re.split(r"[:\[+]", policy)[0], GRAY)
