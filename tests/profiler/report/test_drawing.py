"""Axes and files of pictures."""

import pytest

from costmodel.errors import InputError
from profiler.report.drawing import check_picture, panels, save_figure


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
