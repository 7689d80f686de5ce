"""Ticks, labels and files of pictures."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.errors import InputError
from profiler.report.drawing import (
    check_picture,
    log_axes,
    new_plot,
    panels,
    plain_number,
    round_ticks,
    save_figure,
)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (1, 1000, [1, 10, 100, 1000]),
        (2.4, 70, [5, 10, 20, 50]),
        (3.1, 45, [5, 10, 20]),
        (1.6, 7.2, [2, 3, 4, 5, 7]),
        (3.0, 5.0, [3, 4, 5]),
        (10.4, 10.9, [10.4, 10.6, 10.8]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, ticks: list[float]) -> None:
    found = round_ticks(low, high)
    assert set(ticks) <= {round(tick, 9) for tick in found}
    assert all(low * (1 - 1e-9) <= tick <= high * (1 + 1e-9) for tick in found)


@given(low=st.floats(1e-3, 1e5), factor=st.floats(1.001, 1e6))
def test_every_range_has_some_ticks(low: float, factor: float) -> None:
    assert 2 <= len(round_ticks(low, low * factor)) <= 30


def test_numbers_have_no_powers() -> None:
    numbers = {0.001: "0.001", 0.5: "0.5", 1.0: "1", 2.5: "2.5", 16384: "16,384", 1e6: "1,000,000"}
    assert {value: plain_number(value) for value in numbers} == numbers


def test_logarithmic_axes_show_plain_numbers() -> None:
    figure, axes = new_plot()
    axes.plot([2.0, 3.5], [0.9, 65.0])
    log_axes(axes, "xy")
    figure.canvas.draw()
    labels = [label.get_text() for axis in (axes.xaxis, axes.yaxis)
              for label in axis.get_ticklabels(which="both")]  # fmt: skip
    assert len(labels) >= 6
    assert all(math.isfinite(float(label.replace(",", ""))) for label in labels)


def test_panels_stand_in_rows() -> None:
    figure, grid = panels(5, columns=3)
    assert len(grid) == len(figure.axes) == 5
    assert figure.get_figwidth() == pytest.approx(3 * panels(1)[0].get_figwidth())


@pytest.mark.parametrize(
    ("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.PDF", b"%PDF")]
)
def test_the_ending_is_the_form(tmp_path: Path, name: str, start: bytes) -> None:
    figure, axes = new_plot()
    axes.plot([1, 2])
    assert save_figure(figure, tmp_path / name).read_bytes().startswith(start)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["a", "a.jpg", "a.html", "a.png.txt", ".png"])
def test_other_endings_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"End it in \.png, \.svg or \.pdf"):
        check_picture(tmp_path / name)
