"""Parts of a benchmark's pictures: a colour for each policy, one picture a swept drafter, bars."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from lab.bench.analysis.summary import ResultFigures
from profiler.report.drawing import GRAY, SERIES, Picture, shown, slug

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "bastion": "#e4572e",
    "chain": "#3a86c8",
    "fixed": "#4c9f70",
    "beam": "#9b6bd3",
    "static-tree": "#b07d62",
    "dynatree": "#c79a00",
    "plain": GRAY,
}


def swept_pictures(
    figures: ResultFigures,
    name: str,
    title: tuple[str, str],
    caption: str,
    draw: Callable[[ResultFigures, str], Figure],
) -> list[Picture]:
    """One picture for each drafter whose tree sizes were swept, drawn by `draw`.

    title  the parts before and after the drafter's name
    """
    before, after = title
    if not figures.hindsight:
        return [Picture(name=name, title=f"{before} {after}",
                        missing="add --study sweep for fixed tree sizes")]  # fmt: skip
    return [
        Picture(
            name=f"{name}-{number}-{slug(drafter)}",
            title=f"{before} with {drafter} {after}",
            caption=caption,
            draw=partial(draw, figures, drafter),
        )
        for number, drafter in enumerate(figures.hindsight, start=1)
    ]


def grouped_bars(
    axes: Axes, groups: Sequence[tuple[str, Sequence[float], Sequence[float]]]
) -> None:
    """Bars of several arms side by side: (arm, positions, heights) of each."""
    width = 0.8 / max(len(groups), 1)
    for number, (name, positions, heights) in enumerate(groups):
        shift = (number - (len(groups) - 1) / 2) * width
        axes.bar([position + shift for position in positions], heights, width,
                 color=SERIES[number], label=shown(name))  # fmt: skip
    axes.grid(False, axis="x")


def colour_of(policy: str) -> str:
    """The colour of a policy's family; gray for plain decoding and peers."""
    return COLOURS.get(re.split(r"[:\[+]", policy)[0], GRAY)
