"""The common style of pictures: sizes, colours, labels, axes, legends, and their files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from costmodel.errors import InputError
from costmodel.io import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN = 5.2
HEIGHT_IN = 3.5
GRAY = "#8a8f98"
# Middle tones, readable on a light and on a dark ground.
SERIES = ("#3a86c8", "#e4572e", "#4c9f70", "#9b6bd3", "#c79a00", "#b07d62", "#2aa5a5", "#d45d9c")
LETTERS_PER_IN = 12.5  # of a title
CLOSE = 1.3  # factor below which two tree sizes share one axis label
ENDINGS = (".png", ".svg", ".pdf")


def panels(
    count: int, columns: int = 1, size_in: tuple[float, float] = (WIDTH_IN, HEIGHT_IN)
) -> tuple[Figure, list[Axes]]:
    """A figure of `count` empty plots in rows of up to `columns`, and their axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(size_in[0] * columns, size_in[1] * rows), layout="constrained")
    grid = [axes for line in figure.subplots(rows, columns, squeeze=False) for axes in line]
    for axes in grid[count:]:
        axes.remove()
    for axes in grid[:count]:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    return figure, grid[:count]


def set_title(plot: Figure, title: str) -> None:
    """A title above the plot, broken where it is longer than the plot is wide."""
    text = fill(title, round(LETTERS_PER_IN * plot.get_figwidth()))
    plot.suptitle(text.replace("$", r"\$"), fontsize=10)


def tree_size_axis(axes: Axes, sizes: Sequence[int]) -> None:
    """A logarithmic x axis labelled with the tree sizes; of close neighbours only the first."""
    from matplotlib.ticker import NullLocator

    axes.set_xscale("symlog", base=2, linthresh=1)
    labelled: list[int] = []
    for size in sorted(sizes):
        if not labelled or size + 1 >= CLOSE * (labelled[-1] + 1):
            labelled.append(size)
    axes.set_xticks(labelled, [str(size) for size in labelled])
    axes.xaxis.set_minor_locator(NullLocator())


def log_axes(axes: Axes, names: str) -> None:
    """Logarithmic axes (`x`, `y` or `xy`) with plain numbers, once all is drawn."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    def plain(value: float, _: object) -> str:
        """No power of ten, no trailing zeros, thousands apart."""
        if value >= 1000:
            return f"{value:,.0f}"
        return f"{value:.10f}".rstrip("0").rstrip(".") if value < 1 else f"{value:.6g}"

    for name in names:
        axis = axes.xaxis if name == "x" else axes.yaxis
        getattr(axes, f"set_{name}scale")("log")
        low, high = sorted(getattr(axes, f"get_{name}lim")())
        wide = high > 10 * low
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)) if wide else MaxNLocator(6))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(plain))


def check_picture(path: Path) -> None:
    """Raise InputError unless the name ends like a picture that can be written."""
    if path.suffix.lower() not in ENDINGS:
        raise InputError(
            f"{path}: no picture can be written under this name",
            hint=f"End it in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}",
        )


def save_figure(figure: Figure, path: Path) -> Path:
    """Write the figure in the form of its file's ending, in one step. Raises InputError."""
    import warnings

    check_picture(path)
    picture = io.BytesIO()
    with warnings.catch_warnings():
        # Letters that the font lacks are drawn as boxes.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(picture, dpi=130, format=path.suffix[1:].lower())
    if not path.parent.is_dir():
        raise InputError(f"{path}: not written, there is no folder {path.parent}")
    write_atomic(path, picture.getvalue(), InputError)
    return path
