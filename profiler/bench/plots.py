"""The pictures of a benchmark, in the order of the page, and as PNG files."""

from __future__ import annotations

import warnings
from pathlib import Path
from textwrap import fill

from costmodel.errors import InputError
from profiler.bench.drawing import Picture
from profiler.bench.pictures_speed import speed_pictures, study_pictures, sweep_pictures
from profiler.bench.pictures_time import time_pictures
from profiler.bench.pictures_trees import choice_pictures, length_pictures, score_pictures
from profiler.bench.record import Result
from profiler.bench.view import View
from profiler.report import save_figure

TITLE_WIDTH = 66  # letters


def write_plots(result: Result, folder: str | Path) -> list[Path]:
    """Draw every picture that the run has data for as `folder/<name>.png`; their paths.

    Raises InputError where the folder or a file cannot be written.
    """
    where = Path(folder)
    try:
        where.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot make the folder {where}: {error.strerror or error}",
            hint="Choose a folder you can write to for --plot.",
        ) from error
    written = []
    for pictures in gallery(View(result)).values():
        for picture in pictures:
            if picture.draw is None:
                continue
            figure = picture.draw()
            title = fill(picture.title, TITLE_WIDTH).replace("$", r"\$")
            figure.suptitle(title, fontsize=10)
            with warnings.catch_warnings():
                # A name may hold letters that the font lacks; they are drawn as boxes.
                warnings.filterwarnings("ignore", "Glyph .* missing from font")
                written.append(save_figure(figure, where / f"{picture.name}.png"))
    return written


def gallery(view: View) -> dict[str, list[Picture]]:
    """All pictures by the section of the page that they belong to."""
    return {
        "Speed": [*speed_pictures(view), *sweep_pictures(view), *study_pictures(view)],
        "Acceptance": [*length_pictures(view), *score_pictures(view)],
        "Chosen trees": choice_pictures(view),
        "Time": time_pictures(view),
    }
