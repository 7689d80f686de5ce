"""Tables, JSON and pictures as commands print them, and what a profile says in words."""

from __future__ import annotations

import json

import pytest

from costmodel.calibration.points import ErrorSummary
from costmodel.errors import InputError
from costmodel.profile.profile import Profile
from costmodel.profile.schema import HeldOutSection, RegretSection
from profiler.report.console import print_json, table_lines
from profiler.report.drawing import check_picture, panels, save_figure
from profiler.report.profiles import plot_profile, verdict
from tests.profiler.made_profile import make_profile


def checked(worst: float = 0.012, noise: float | None = 0.004) -> Profile:
    """The made profile with a held-out error and a regret."""
    return make_profile().model_copy(
        update={
            "held_out": HeldOutSection(
                error=ErrorSummary(points=9, mape=0.02, median=0.015, p95=0.04, worst=0.05),
                repeat_noise=noise,
            ),
            "regret": RegretSection(mean=0.0012, worst=worst, curves=18, contexts=(70, 300)),
        }
    )


class TestVerdict:
    def test_it_says_what_a_choice_costs(self):
        assert verdict(checked()) == (
            "Choosing the tree size from this profile costs 0.12% of tokens/s on average and at "
            "most 1.2%, over 18 acceptance curves at 2 contexts held out. Predictions there are "
            "off by 1.5% in the median and 5.0% at worst; the measurements themselves are "
            "uncertain by 0.4%."
        )

    def test_a_large_regret_says_what_to_do(self):
        text = verdict(checked(worst=0.09))
        assert "at most 9.0%, over" in text
        assert "`rooftree calibrate --time-budget 3m`" in text

    @pytest.mark.parametrize("missing", ["held_out", "regret"])
    def test_an_unchecked_profile_is_not_trusted(self, missing):
        text = verdict(checked().model_copy(update={missing: None}))
        assert text.startswith("This profile was not checked")
        assert "%" not in text


class TestPicture:
    def test_a_profile_without_points_is_drawn_too(self, tmp_path):
        profile = make_profile().model_copy(update={"surface": None})
        assert plot_profile(profile, tmp_path / "a.png").stat().st_size > 1000


class TestJson:
    def test_numbers_that_json_lacks_are_null(self, capsys):
        print_json({"a": float("nan"), "b": (1.0, float("inf")), "c": {"d": [float("-inf")]}})
        shown = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
        assert shown == {"a": None, "b": [1.0, None], "c": {"d": [None]}, "schema_version": 1}


class TestTable:
    def test_control_characters_do_not_reach_the_terminal(self):
        lines = table_lines(("a", "b"), [("\x1b[2Jx\ny", "\u202etxt")], 80)
        assert lines[2] == r"\x1b[2Jx\ny  \u202etxt"


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
