"""Requests by their moments, goals, and traces that are read, stretched and dealt."""

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import pytest

from costmodel.errors import InputError
from costmodel.planning.request import (
    Goals,
    PercentileGoal,
    SimulationSettings,
    parse_engine,
    parse_seconds,
    seconds_text,
)
from costmodel.planning.simulation.percentiles import server_traces
from costmodel.planning.traffic import LognormalLength, Trace, Traffic, poisson_trace, read_trace
from tests.costmodel.planning.conftest import asked

HEADER = "arrival_s,prompt_tokens,output_tokens"


def test_poisson_arrivals_and_lognormal_lengths_have_their_moments() -> None:
    lengths = LognormalLength(mean_tokens=7), LognormalLength(mean_tokens=3)
    found = poisson_trace(5.0, 50_000, *lengths, np.random.default_rng(0))
    gaps = np.diff(found.arrival_s)
    assert found.rate_per_s == pytest.approx(5.0, rel=0.02)
    assert np.std(gaps) == pytest.approx(np.mean(gaps), rel=0.02)
    assert np.mean(gaps > 0.4) == pytest.approx(math.exp(-2), rel=0.05)
    assert (set(found.prompt_tokens), set(found.output_tokens)) == ({7}, {3})
    random = np.random.default_rng(1)
    drawn = LognormalLength(mean_tokens=800, variation=0.6).draw(200_000, random)
    assert np.mean(drawn) == pytest.approx(800, rel=0.01)
    assert np.std(drawn) / np.mean(drawn) == pytest.approx(0.6, rel=0.02)
    drawn = LognormalLength(mean_tokens=2, variation=3, most_tokens=9).draw(5000, random)
    assert (drawn.min(), drawn.max()) == (1, 9)


def test_a_trace_is_read_whatever_the_order_of_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "output_tokens, model ,arrival_s,prompt_tokens\n9,x,0.5,100\n8,y,0.5,1e2\n7,,2,300.0\n",
        encoding="utf-8-sig",
    )
    found = read_trace(path)
    assert list(found.arrival_s) == [0.5, 0.5, 2.0]
    assert list(found.prompt_tokens) == [100, 100, 300]
    assert list(found.output_tokens) == [9, 8, 7]
    assert found.prompt_tokens.dtype == np.int64


@pytest.mark.parametrize(("text", "message"), [
    ("\x00\xff", r"not a CSV file in UTF-8 \("),
    ("", "no column arrival_s and no column prompt_tokens and no column output_tokens"),
    ("arrival_s,prompt\n0,1\n", "no column prompt_tokens and no column output_tokens"),
    (f"{HEADER}\n", "there are no requests below the header"),
    (f"{HEADER}\n0,1,1\n1,,1\n", "line 3: prompt_tokens must be a finite number .is ''"),
    (f"{HEADER}\n-1,1,1\n", "line 2: arrival_s must be 0 or later .is -1"),
    (f"{HEADER}\nnan,1,1\n", "line 2: arrival_s must be a finite number"),
    (f"{HEADER}\n0,-5,1\n", "line 2: prompt_tokens must be a whole number from 1"),
    (f"{HEADER}\n0,1,0\n", "line 2: output_tokens must be a whole number from 1"),
    (f"{HEADER}\n0,1,2.5\n", "line 2: output_tokens must be a whole number"),
    (f"{HEADER}\n0,1,1e30\n", "line 2: output_tokens must be a whole number"),
    (f"{HEADER}\n3,1,1\n2,1,1\n", "line 3: arrival_s falls from 3 to 2. Sort the lines"),
])  # fmt: skip
def test_a_bad_trace_is_one_line_with_the_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=message) as caught:
        read_trace(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_goals_and_seconds_are_read_and_written():
    goals = Goals.parse("tpot=30ms, TTFT.p95=1s,ttft=0.5s,tpot.p99=60ms")
    assert (goals.tpot_s, goals.ttft_s) == (0.03, 0.5)
    assert goals.percentiles == (
        PercentileGoal(metric="ttft", percent=95, seconds=1.0),
        PercentileGoal(metric="tpot", percent=99, seconds=0.06),
    )
    assert goals.describe() == "30 ms a token, 0.5 s to the first, ttft.p95 1 s, tpot.p99 60 ms"
    found = [parse_seconds(text) for text in ("30ms", "1s", "0.5", "20us")]
    assert found == pytest.approx([0.03, 1, 0.5, 2e-5])
    assert [seconds_text(value) for value in (0.0304, 1.234, 12.0)] == ["30.4 ms", "1.23 s", "12 s"]


@pytest.mark.parametrize(("text", "said"), [
    ("ttft.p95=1s,ttft.p95=2s", "given twice"), ("ttft.95=1s", "no goal is called 'ttft.95'"),
    ("ttft.=1s", "no goal is called 'ttft.'"), ("speed.p95=1s", "no goal is called 'speed.p95'"),
    ("ttft.p95", "is not a time"), ("tpot=30", "the goal tpot=30 has no unit"),
])  # fmt: skip
def test_bad_goals_are_refused(text, said):
    with pytest.raises(InputError, match=said):
        Goals.parse(text)


def test_an_engine_is_read_with_its_version_and_settings():
    settings = {"engine": "vllm", "engine_version": "0.15", "step_tokens": 2048, "prefix_hits": 0.3}
    text = "vllm@0.15,step-tokens=2048,prefix-hits=0.3"
    assert parse_engine("vllm@0.15, prefix-hits=.3, step-tokens=2048") == settings
    request = asked(**parse_engine(text))
    assert request.engine_name == text
    for wrong, said in (
        ("vllm@", "'vllm@' names no version"),
        ("vllm,hits=1", "'hits' is no setting of an engine. Write --engine vllm,step-tokens=2048"),
        ("vllm,step-tokens=1,step-tokens=2", "step-tokens is given twice"),
        ("vllm,step-tokens=1e3", "'step-tokens=1e3' is no whole number of tokens"),
        ("vllm,prefix-hits=half", "'prefix-hits=half' has no number"),
    ):
        with pytest.raises(InputError, match=re.escape(said)):
            parse_engine(wrong)
    for name, value, said in (("prefix_hits", 1.0, "below 1 .is 1."), ("step_tokens", 0, "room")):
        with pytest.raises(InputError, match=said):
            dataclasses.replace(request, **{name: value})


TRAFFIC = Traffic(prompt_tokens=300, output_tokens=100)


def trace(count: int = 120) -> Trace:
    each = np.arange(count)
    return Trace(arrival_s=3.0 + 0.5 * each, prompt_tokens=10 + each, output_tokens=1 + each % 7)


def test_drawn_requests_are_one_servers_part_of_the_rate():
    sampling = SimulationSettings(requests=40_000, seed=1)
    (drawn,) = server_traces(sampling, TRAFFIC, 12.0, 3, None)
    assert drawn.rate_per_s == pytest.approx(4.0, rel=0.02)
    assert drawn.prompt_tokens.mean() == pytest.approx(300, rel=0.02)
    assert drawn.output_tokens.std() / drawn.output_tokens.mean() == pytest.approx(0.7, rel=0.05)
    (one,) = server_traces(sampling, TRAFFIC, 12.0, 1, None)
    assert np.allclose(drawn.arrival_s, 3 * one.arrival_s)
    assert np.array_equal(drawn.prompt_tokens, one.prompt_tokens)
    assert np.array_equal(drawn.output_tokens, one.output_tokens)
    (drawn,) = server_traces(SimulationSettings(variation=2.0), TRAFFIC, 5.0, 1, 600)
    whole = drawn.prompt_tokens + drawn.output_tokens
    assert whole.max() == 600 and drawn.output_tokens.min() >= 1


def test_a_trace_is_stretched_to_the_rate_and_dealt_in_turn():
    """Two requests a second become eight: 120 of them take 14.875 s, not 59.5."""
    one, two, three = server_traces(SimulationSettings(trace=trace()), TRAFFIC, 8.0, 3, None)
    assert one.arrival_s[:3].tolist() == [0.0, 0.375, 0.75]
    assert three.arrival_s[-1] == pytest.approx(14.875)
    assert two.prompt_tokens[:3].tolist() == [11, 14, 17]
    assert len(one) + len(two) + len(three) == 120
    parts = server_traces(SimulationSettings(trace=trace(), requests=100), TRAFFIC, 2.0, 300, None)
    assert len(parts) == 100 and all(len(part) == 1 for part in parts)
    assert SimulationSettings(trace=trace(), requests=1000).count == 120


def test_a_request_beyond_the_models_window_and_a_short_trace_are_refused():
    found = trace()
    longest = int((found.prompt_tokens + found.output_tokens).max())
    SimulationSettings(trace=found).check_window("model", longest)
    with pytest.raises(InputError, match=f"request 119 of the trace has {longest} tokens"):
        SimulationSettings(trace=found).check_window("model", longest - 1)
    SimulationSettings(trace=found, requests=100).check_window("model", longest - 1)
    with pytest.raises(InputError, match="the trace has 20 requests"):
        asked(simulation=SimulationSettings(trace=trace(20)))
