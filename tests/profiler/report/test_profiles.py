"""What a profile says in words, in a table and in a picture."""

from __future__ import annotations

import pytest

from costmodel.calibration.points import ErrorSummary
from costmodel.profile.profile import Profile
from costmodel.profile.schema import HeldOutSection, RegretSection
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
            "Choosing the tree size from this profile costs at most 1.2% of tokens/s (0.12% on "
            "average), over 18 acceptance curves at 2 contexts held out. Predictions there are "
            "off by 1.5% in the median and 5.0% at worst; the measurements themselves are "
            "uncertain by 0.4%."
        )

    def test_a_large_regret_says_what_to_do(self):
        text = verdict(checked(worst=0.09))
        assert "at most 9.0% of tokens/s" in text
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
