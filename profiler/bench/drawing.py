"""How the pictures of a benchmark look: sizes, colours, and names that are shown as they are."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN = 5.2
HEIGHT_IN = 3.5
GRAY = "#8a8f98"
# Middle tones, readable on a light and on a dark ground.
COLOURS = {
    "bastion": "#e4572e",
    "chain": "#3a86c8",
    "fixed": "#4c9f70",
    "beam": "#9b6bd3",
    "static-tree": "#b07d62",
    "dynatree": "#c79a00",
    "plain": GRAY,
}
SERIES = ("#3a86c8", "#e4572e", "#4c9f70", "#9b6bd3", "#c79a00", "#b07d62", "#2aa5a5", "#d45d9c")
LONGEST_LABEL = 34
CLOSE = 1.3  # tree sizes nearer than by this factor share one name on an axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One picture, or the reason why this run cannot have it.

    name     letters, digits and dashes, unique in a run: the file's name without `.png`
    caption  what is measured and how to read it
    draw     makes the figure; None where the data is missing
    missing  which option would add it
    """

    name: str
    title: str
    caption: str = ""
    draw: Callable[[], Figure] | None = None
    missing: str = ""


def new_figure(height_in: float = HEIGHT_IN) -> tuple[Figure, Axes]:
    """An empty figure of the common width with one plot in it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes


def name_axes(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)


def legend_below(figure: Figure, axes: Axes, columns: int = 3) -> None:
    """A legend under the plot, where it can hide nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8,
                      framealpha=0.0)  # fmt: skip


def tree_size_axis(axes: Axes, sizes: list[int]) -> None:
    """A logarithmic axis of tree sizes that names the sizes themselves, where they are apart."""
    from matplotlib.ticker import NullLocator

    axes.set_xscale("symlog", base=2, linthresh=1)
    named: list[int] = []
    for size in sorted(sizes):
        if not named or size + 1 >= CLOSE * (named[-1] + 1):
            named.append(size)
    axes.set_xticks(named, [str(size) for size in named])
    axes.xaxis.set_minor_locator(NullLocator())


def shown(name: str) -> str:
    """A name as a label: nothing in it is taken for mathematics, and a long one is cut."""
    if len(name) > LONGEST_LABEL:
        name = name[: LONGEST_LABEL - 1] + "\N{HORIZONTAL ELLIPSIS}"
    text = name.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text  # a leading _ would hide it in a legend


def colour_of(policy: str) -> str:
    """The colour of a policy's family; gray for plain decoding and peers."""
    return COLOURS.get(re.split(r"[:\[+]", policy)[0], GRAY)


def slug(text: str) -> str:
    """A text as part of a file's name: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40]
