"""Trace of a simulation: drawn ones, and a trace that is stretched and dealt."""

from __future__ import annotations

import numpy as np
import pytest

from costmodel.errors import InputError
from costmodel.planning.request import PlanRequest, SimulationSettings
from costmodel.planning.simulation.percentiles import server_traces
from costmodel.planning.traffic import Trace, Traffic

TRAFFIC = Traffic(prompt_tokens=300, output_tokens=100)


def trace(count: int = 120, gap_s: float = 0.5) -> Trace:
    return Trace(
        arrival_s=3.0 + gap_s * np.arange(count),
        prompt_tokens=10 + np.arange(count),
        output_tokens=1 + np.arange(count) % 7,
    )


def test_drawn_requests_are_one_servers_part_of_the_rate():
    sampling = SimulationSettings(requests=40_000, seed=1)
    (drawn,) = server_traces(sampling, TRAFFIC, 12.0, 3, None)
    assert drawn.rate_per_s == pytest.approx(4.0, rel=0.02)
    assert drawn.prompt_tokens.mean() == pytest.approx(300, rel=0.02)
    assert drawn.output_tokens.std() / drawn.output_tokens.mean() == pytest.approx(0.7, rel=0.05)


def test_more_servers_get_the_same_requests_farther_apart():
    one, four = (server_traces(SimulationSettings(), TRAFFIC, 5.0, n, None)[0] for n in (1, 4))
    assert np.allclose(four.arrival_s, 4 * one.arrival_s)
    assert np.array_equal(four.prompt_tokens, one.prompt_tokens)
    assert np.array_equal(four.output_tokens, one.output_tokens)


def test_equal_lengths_without_variation():
    (drawn,) = server_traces(SimulationSettings(variation=0.0), TRAFFIC, 5.0, 1, None)
    assert set(drawn.prompt_tokens) == {300} and set(drawn.output_tokens) == {100}


def test_no_request_is_longer_than_the_window():
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


def test_the_start_of_a_trace_and_more_servers_than_requests():
    parts = server_traces(SimulationSettings(trace=trace(), requests=100), TRAFFIC, 2.0, 300, None)
    assert len(parts) == 100 and all(len(part) == 1 for part in parts)
    assert SimulationSettings(trace=trace(), requests=1000).count == 120


def test_a_request_beyond_the_models_window_is_named():
    found = trace()
    longest = int((found.prompt_tokens + found.output_tokens).max())
    SimulationSettings(trace=found).check_window("model", longest)
    with pytest.raises(InputError, match=f"request 119 of the trace has {longest} tokens"):
        SimulationSettings(trace=found).check_window("model", longest - 1)
    SimulationSettings(trace=found, requests=100).check_window("model", longest - 1)


def test_a_short_trace_is_refused():
    with pytest.raises(InputError, match="the trace has 20 requests"):
        PlanRequest(
            target="qwen3-8b", gpus=("h100-sxm",), traffic=TRAFFIC, rate=1.0,
            simulation=SimulationSettings(trace=trace(20)),
        )  # fmt: skip
