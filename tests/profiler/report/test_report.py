"""Tables, JSON and pictures as commands print them, and what a profile says in words."""

import json
from pathlib import Path

import pytest

from costmodel.calibration.points import ErrorSummary
from costmodel.errors import InputError
from costmodel.profile.profile import Profile
from costmodel.profile.schema import HeldOutSection, RegretSection
from profiler.report.console import print_json, print_table
from profiler.report.drawing import check_picture, panels, save_figure
from profiler.report.profiles import next_command, plot_profile, print_markdown, verdict
from tests.profiler.made_profile import TARGET, make_profile


def checked(worst: float = 0.012, noise: float | None = 0.004) -> Profile:
    """The made profile with a held-out error and a regret."""
    error = ErrorSummary(points=9, mape=0.02, median=0.015, p95=0.04, worst=0.05)
    regret = RegretSection(mean=0.0012, worst=worst, curves=18, contexts=(70, 300))
    parts = {"held_out": HeldOutSection(error=error, repeat_noise=noise), "regret": regret}
    return make_profile().model_copy(update=parts)


class TestVerdict:
    def test_it_says_what_a_choice_costs_and_what_to_do(self):
        before, trust = verdict(checked()).split(" Choosing")
        assert before == (
            "At context 256 this device is bound by memory at all 16 rows (physical roofline). At "
            "the usual acceptance, 1 + 3.5 N / (N + 16) tokens from N nodes, and with a free draft "
            f"a tree of 15 nodes pays: {1 + 3.5 * 15 / 31:.2f} times plain decoding."
        )
        assert f"Choosing{trust}" == (
            "Choosing the tree size from this profile costs 0.12% of tokens/s on average and at "
            "most 1.2%, over 18 acceptance curves at 2 contexts held out. Predictions there are "
            "off by 1.5% in the median and 5.0% at worst; the measurements themselves are "
            "uncertain by 0.4%. Grade: usable: measured at 4 points, 12 will do."
        )
        text = verdict(checked(worst=0.09))
        assert "at most 9.0%, over" in text
        assert text.endswith("Grade: do not use: a choice loses 9.0% at worst, more than 8.0%.")
        again = f"then `rooftree calibrate --target {TARGET} --time-budget 3m`"
        assert again in next_command(checked(worst=0.09), "a.yaml")
        assert "uncertain by less than 0.1%, or by too few samples" in verdict(checked(noise=0.0))

    def test_markdown_has_the_points_and_the_verdict(self, capsys):
        profile = checked()
        linear = profile.calibration.linear.model_copy(update={"intercept_s": -0.00052})
        calibration = profile.calibration.model_copy(update={"linear": linear})
        made = profile.provenance.model_copy(update={"points": 1})
        profile = profile.model_copy(update={"calibration": calibration, "provenance": made})
        print_markdown(profile, Path("a.yaml"))
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"### {TARGET} on Test GPU"
        assert "1 point, 0 samples (`a.yaml`)" in lines[2]
        assert lines[4] == "| rows | nodes | ms at context 256 | ms at context 2048 |"
        assert lines[6:8] == ["| 1 | 0 | 5.0 | 5.0 |", "| 16 | 15 | 5.0 | 5.0 |"]
        assert "x roofline - 0.52 ms (+- " in lines[9]
        assert lines[-1] == verdict(profile)

    @pytest.mark.parametrize("missing", ["held_out", "regret"])
    def test_an_unchecked_profile_is_not_trusted(self, missing):
        text = verdict(checked().model_copy(update={missing: None}))
        assert "This profile was not checked" in text and "%" not in text
        assert "Grade: usable: not checked against points held out" in text


def test_a_profile_without_points_is_drawn_too(tmp_path):
    profile = make_profile().model_copy(update={"surface": None})
    assert plot_profile(profile, tmp_path / "a.png").stat().st_size > 1000


def test_numbers_that_json_lacks_are_null_and_control_characters_are_spelt_out(capsys):
    print_json({"a": float("nan"), "b": (1.0, float("inf")), "c": {"d": [float("-inf")]}})
    shown = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert shown == {"a": None, "b": [1.0, None], "c": {"d": [None]}, "schema_version": 1}
    print_table(("a", "b"), [("\x1b[2Jx\ny", "\u202etxt")])
    assert capsys.readouterr().out.splitlines()[2] == r"\x1b[2Jx\ny  \u202etxt"


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
