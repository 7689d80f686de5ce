"""A picture of the page, an empty plot of its width, and names as labels."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from profiler.report.drawing import panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN = 5.2
HEIGHT_IN = 3.5
LONGEST_LABEL = 34


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One picture, or the reason why there is none.

    name     letters, digits and dashes, unique on a page; the file name without its ending
    caption  the quantity and how to read it
    draw     makes the figure; None where the data is missing
    missing  the option that would add the data
    """

    name: str
    title: str
    caption: str = ""
    draw: Callable[[], Figure] | None = None
    missing: str = ""


def new_plot(height_in: float = HEIGHT_IN) -> tuple[Figure, Axes]:
    """An empty plot of the common width, and its axes."""
    plot, (axes,) = panels(1, size_in=(WIDTH_IN, height_in))
    return plot, axes


def finish(plot: Figure, axes: Axes, labels: tuple[str, str], columns: int = 0) -> Figure:
    """Label the x and y axes and put a legend below the plot, where it hides nothing.

    columns  of the legend; 0 for no legend
    """
    x, y = labels
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    handles, names = axes.get_legend_handles_labels()
    if columns and names:
        plot.legend(handles, names, loc="outside lower center", ncols=columns, fontsize=8,
                    framealpha=0.0)  # fmt: skip
    return plot


def shown(name: str) -> str:
    """A name as a label: cut where it is long, `$` and a leading `_` taken literally."""
    if len(name) > LONGEST_LABEL:
        name = name[: LONGEST_LABEL - 1] + "\N{HORIZONTAL ELLIPSIS}"
    text = name.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text  # a leading _ would hide it in a legend


def slug(text: str) -> str:
    """A text as part of a file name: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40]
