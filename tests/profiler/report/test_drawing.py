"""Axes and files of pictures."""

import math

import pytest

from costmodel.errors import InputError
from profiler.report.drawing import check_picture, log_axes, panels, save_figure


def test_logarithmic_axes_show_plain_numbers():
    figure, (axes,) = panels(1)
    axes.plot([2.0, 3.5], [0.9, 65.0])
    log_axes(axes, "xy")
    figure.canvas.draw()
    labels = [label.get_text() for axis in (axes.xaxis, axes.yaxis)
              for label in axis.get_ticklabels(which="both")]  # fmt: skip
    assert len(labels) >= 6
    assert all(math.isfinite(float(label.replace(",", ""))) for label in labels)


@pytest.mark.parametrize(
    ("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.PDF", b"%PDF")]
)
def test_the_ending_is_the_form(tmp_path, name, start):
    figure, (axes,) = panels(1)
    axes.plot([1, 2])
    assert save_figure(figure, tmp_path / name).read_bytes().startswith(start)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["a", "a.jpg", "a.html", "a.png.txt", ".png"])
def test_other_endings_are_refused(tmp_path, name):
    with pytest.raises(InputError, match=r"End it in \.png, \.svg or \.pdf"):
        check_picture(tmp_path / name)
