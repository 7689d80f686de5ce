"""What a profile says in words, in a table and in a picture."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from matplotlib.text import Text

from costmodel.calibration.points import ErrorSummary
from costmodel.errors import InputError
from costmodel.profile.profile import Profile
from costmodel.profile.schema import HeldOutSection, RegretSection
from profiler.report import profiles as report
from profiler.report.profiles import (
    linear_line,
    plot_profile,
    profile_columns,
    profile_rows,
    verdict,
)
from tests.profiler.made_profile import TARGET, make_profile


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
    def test_it_says_what_a_choice_costs(self) -> None:
        assert verdict(checked()) == (
            "Choosing the tree size from this profile costs at most 1.2% of tokens/s (0.12% on "
            "average), over 18 acceptance curves at 2 contexts held out. Predictions there are "
            "off by 1.5% in the median and 5.0% at worst; the measurements themselves are "
            "uncertain by 0.4%."
        )

    def test_a_large_regret_says_what_to_do(self) -> None:
        text = verdict(checked(worst=0.09))
        assert "at most 9.0% of tokens/s" in text
        assert "`rooftree calibrate --fresh`" in text

    def test_unknown_noise_is_not_mentioned(self) -> None:
        assert "uncertain" not in verdict(checked(noise=None))

    @pytest.mark.parametrize("missing", ["held_out", "regret"])
    def test_an_unchecked_profile_is_not_trusted(self, missing: str) -> None:
        text = verdict(checked().model_copy(update={missing: None}))
        assert text.startswith("This profile was not checked")
        assert "%" not in text


class TestTable:
    def test_rows_down_and_contexts_across(self) -> None:
        profile = make_profile()
        assert profile_columns(profile) == [
            "rows", "nodes", "ms at context 256", "ms at context 2048",
        ]  # fmt: skip
        assert profile_rows(profile) == [[1, 0, 5.0, 5.0], [16, 15, 5.0, 5.0]]

    def test_a_missing_point_is_a_hole(self) -> None:
        profile = make_profile()
        surface = profile.surface.model_copy(
            update={
                name: getattr(profile.surface, name)[:3]
                for name in ("rows", "context", "batch", "median_s", "mad_s", "n")
            }
        )
        profile = profile.model_copy(update={"surface": surface})
        assert profile_rows(profile) == [[1, 0, 5.0, 5.0], [16, 15, 5.0, None]]

    def test_no_surface_no_rows(self) -> None:
        profile = make_profile().model_copy(update={"surface": None})
        assert (profile_rows(profile), profile_columns(profile)) == ([], ["rows", "nodes"])

    def test_linear_line(self) -> None:
        line = linear_line(make_profile())
        assert line.startswith("linear calibration: 0.000 x roofline + 5.00 ms")
        assert line.endswith("RMSE 2.0 -> 0.0 ms (100% less)")


class TestPicture:
    def test_it_is_a_png_of_some_size(self, tmp_path: Path) -> None:
        path = plot_profile(make_profile(), tmp_path / "a.png")
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = struct.unpack(">II", content[16:24])
        assert width > 600 and height > 300
        assert [file.name for file in tmp_path.iterdir()] == ["a.png"]

    def test_what_is_drawn(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        drawn = []
        monkeypatch.setattr(
            report, "save_figure", lambda figure, path: drawn.append(figure) or path
        )
        profile = make_profile()
        plot_profile(profile, tmp_path / "a.png")
        (figure,) = drawn
        assert TARGET in figure.get_suptitle()
        assert "Test GPU" in figure.get_suptitle()
        assert [axis.get_title() for axis in figure.axes] == ["context 256", "context 2,048"]
        for axis in figure.axes:
            lines = {line.get_label(): line for line in axis.get_lines()}
            assert {"bare roofline", "linear calibration"} <= set(lines)
            np.testing.assert_allclose(lines["linear calibration"].get_ydata(), 5.0, rtol=0.2)
            (measured,) = axis.containers
            assert measured.get_label() == "measured"
            np.testing.assert_array_equal(measured.lines[0].get_xdata(), [0, 15])
            np.testing.assert_allclose(measured.lines[0].get_ydata(), 5.0)

    @pytest.mark.parametrize("kind", ["composed", "transferred", "quick"])
    def test_points_are_called_by_where_they_come_from(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
    ) -> None:
        drawn = []
        monkeypatch.setattr(
            report, "save_figure", lambda figure, path: drawn.append(figure) or path
        )
        made = make_profile()
        provenance = made.provenance.model_copy(update={"kind": kind})
        plot_profile(made.model_copy(update={"provenance": provenance}), tmp_path / "a.png")
        (figure,) = drawn
        words = [text.get_text() for text in figure.findobj(Text)]
        assert kind in words
        assert not [word for word in words if "measured" in word]

    def test_a_profile_without_points_is_drawn_too(self, tmp_path: Path) -> None:
        profile = make_profile().model_copy(update={"surface": None})
        assert plot_profile(profile, tmp_path / "a.png").stat().st_size > 1000

    def test_an_old_picture_is_replaced_whole_or_not_at_all(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "a.png"
        path.write_bytes(b"old")

        def full(handle: int, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("os.write", full)
            with pytest.raises(InputError, match=r"a\.png: not written, the disk is full\. Free"):
                plot_profile(make_profile(), path)
        assert path.read_bytes() == b"old"
        assert [file.name for file in tmp_path.iterdir()] == ["a.png"]
        plot_profile(make_profile(), path)
        assert path.read_bytes().startswith(b"\x89PNG")
