"""Goals as they are typed: means, percentiles, and what is refused."""

from __future__ import annotations

import pytest

from costmodel.errors import InputError
from costmodel.planning.request import Goals, PercentileGoal, parse_seconds, seconds_text


def test_means_and_percentiles_stand_side_by_side():
    goals = Goals.parse("tpot=30ms, TTFT.p95=1s,ttft=0.5s,tpot.p99=60ms")
    assert (goals.tpot_s, goals.ttft_s) == (0.03, 0.5)
    assert goals.percentiles == (
        PercentileGoal(metric="ttft", percent=95, seconds=1.0),
        PercentileGoal(metric="tpot", percent=99, seconds=0.06),
    )
    assert goals.describe() == "30 ms a token, 0.5 s to the first, ttft.p95 1 s, tpot.p99 60 ms"


def test_no_goals_are_none():
    assert not Goals.parse("")
    assert Goals.parse("").describe() == "no goals"
    assert Goals.parse("ttft.p50=1s") and Goals.parse("tpot=1s")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ttft.p95=1s,ttft.p95=2s", "given twice"),
        ("ttft.p97=1s", "p97 is no goal"),
        ("ttft.95=1s", "no goal is called 'ttft.95'"),
        ("ttft.=1s", "no goal is called 'ttft.'"),
        ("speed.p95=1s", "no goal is called 'speed.p95'"),
        ("ttft.p95=0s", "must be a time above 0"),
        ("ttft.p95", "is not a time"),
        ("tpot=30", "the goal tpot=30 has no unit"),
    ],
)
def test_bad_goals_are_refused(text, said):
    with pytest.raises(InputError, match=said):
        Goals.parse(text)


def test_seconds_are_read_and_written():
    found = [parse_seconds(text) for text in ("30ms", "1s", "0.5", "20us")]
    assert found == pytest.approx([0.03, 1, 0.5, 2e-5])
    assert [seconds_text(value) for value in (0.0304, 1.234, 12.0)] == ["30.4 ms", "1.23 s", "12 s"]
