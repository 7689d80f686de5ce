"""Percentiles of a plan against the closed form of a queue."""

import dataclasses
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.errors import InputError
from costmodel.planning.request import Goals, PlanRequest, SimulationSettings
from costmodel.planning.search import plan
from costmodel.planning.simulation.engine import SimulationResult
from costmodel.planning.simulation.percentiles import (
    MOST_TIMES,
    SimulatedChoice,
    gather,
    simulate_option,
    smallest,
)
from costmodel.planning.traffic import Trace, Traffic
from tests.costmodel.planning import conftest, queueing
from tests.costmodel.planning.conftest import SHIPPED, LineSteps, point, server_of

SAMPLING = SimulationSettings(requests=20_000, variation=0.0)
# One request at once: a prompt takes a second, and an answer is one token.
ALONE = server_of(LineSteps(fixed_s=0.5, row_s=0.01, token_s=0.0))
CHOICE = SimulatedChoice(gpu="made up", server=ALONE, points=(point(1),), gpus=1, error=0.0)


def asked(rate: float, slo: str = "", **changes) -> PlanRequest:
    short = {"gpus": ("made up",), "traffic": Traffic(prompt_tokens=100, output_tokens=1)}
    given = {"rate": rate, "goals": Goals.parse(slo), "simulation": SAMPLING}
    return conftest.asked(**(short | given | changes))


def test_a_queue_of_prompts_is_md1_and_intervals_are_of_other_times():
    many = SimulationSettings(requests=60_000, variation=0.0)
    found = simulate_option(asked(0.8), many, CHOICE).planned
    for percent in (50, 90, 95, 99):
        exact_s = queueing.md1_waiting_quantile_s(0.8, 1.0, percent / 100)
        assert getattr(found.waiting, f"p{percent}").value == pytest.approx(exact_s, rel=0.08)
        assert getattr(found.ttft, f"p{percent}").value == pytest.approx(1 + exact_s, rel=0.08)
    assert found.utilisation == pytest.approx(0.8, rel=0.02)
    assert found.running == pytest.approx(0.8, rel=0.02)
    assert found.tpot is None and not found.overloaded and found.missed == ()
    # 20 % of error: a load of 0.5 is one of 0.69 where all takes 1.38 times as long
    found = simulate_option(asked(0.5), SAMPLING, dataclasses.replace(CHOICE, error=0.2)).planned
    wide = np.exp(1.606 * 0.2)
    quick_s = 1 / wide + queueing.md1_waiting_quantile_s(0.5, 1 / wide, 0.95)
    slow_s = wide + queueing.md1_waiting_quantile_s(0.5, wide, 0.95)
    assert found.ttft.p95.low == pytest.approx(quick_s, rel=0.08)
    assert found.ttft.p95.high == pytest.approx(slow_s, rel=0.08)


@pytest.mark.parametrize("most_s", [1.8, 4.0])
def test_the_smallest_fleet_is_that_of_the_closed_form(most_s):
    """1.6 requests/s and a goal for ttft.p95: servers at 1.6 / n each."""
    exact = next(
        n for n in range(2, 99) if 1 + queueing.md1_waiting_quantile_s(1.6 / n, 1.0, 0.95) <= most_s
    )
    request = asked(1.6, f"ttft.p95={most_s}s", prices={"made up": 2.0})
    found = simulate_option(request, SAMPLING, dataclasses.replace(CHOICE, gpus=2))
    assert found.enough.gpus == exact and found.enough.missed == ()
    assert found.cost_per_hour == 2.0 * exact
    assert found.planned.missed == (("ttft.p95",) if exact > 2 else ())


def test_goals_that_a_queue_misses_take_more_servers_up_to_the_largest_fleet():
    few = dataclasses.replace(SAMPLING, requests=4_000)
    found = simulate_option(asked(0.5, "ttft.p50=0.9s"), few, CHOICE)
    assert found.enough is None and found.cost_per_hour is None
    assert found.tried_gpus == found.nearest.gpus == MOST_TIMES
    assert found.nearest.ttft.p50.value == pytest.approx(1.0)
    found = simulate_option(asked(1.5, "ttft.p95=9s"), few, CHOICE)
    assert found.planned.overloaded and found.planned.missed == ("ttft.p95",)
    assert found.planned.ttft.p95.high is None
    assert found.enough.gpus == 2
    found = simulate_option(asked(0.8, "ttft=2.5s"), few, CHOICE)  # the mean is 1 + 2 s
    assert (found.planned.missed, found.enough.gpus) == (("ttft",), 2)


@pytest.mark.parametrize(("rate", "load"), [(0.1, 0.5), (40.0, 0.5), (0.1, 1.5)])
def test_where_queues_grow_json_has_no_time_to_the_first_token(rate, load):
    few = dataclasses.replace(SAMPLING, requests=200)
    short = Traffic(prompt_tokens=100, output_tokens=40)
    request = conftest.asked(rate=rate, simulation=few, servers=1, most_running=2, traffic=short)
    found = plan(request, SHIPPED)
    sizing = dataclasses.replace(found.options[0].sizing, load=load)
    best = dataclasses.replace(found.options[0], sizing=sizing)
    record = dataclasses.replace(found, options=(best,)).as_dict()
    (option,), sizing = record["options"], record["options"][0]["sizing"]
    assert option["queues"] == (rate > 1 or load > 1)
    assert [one["ttft_s"] is None for one in (sizing, sizing["at_load"])] == [option["queues"]] * 2
    planned = record["simulation"]["options"][0]["planned"]
    assert [planned[key] is None for key in ("ttft", "waiting", "tpot")] == [rate > 1] * 2 + [False]


def test_the_same_seed_gives_the_same_answer():
    settings = [SimulationSettings(requests=500, variation=0.7, seed=seed) for seed in (4, 4, 5)]
    runs = [simulate_option(asked(0.8, simulation=one), one, CHOICE) for one in settings]
    assert runs[0] == runs[1] != runs[2]


@given(need=st.integers(1, 400), below=st.integers(1, 50), times=st.integers(1, 20))
def test_the_search_finds_what_a_scan_finds(need, below, times):
    most = below * times
    scanned = next((n for n in range(below + 1, most + 1) if n >= need), None)
    tried: list[int] = []
    assert smallest(lambda n: tried.append(n) or n >= need, below, most) == scanned
    assert len(tried) == len(set(tried)) <= 2 * (times.bit_length() + below.bit_length() + 1)


def test_a_trace_on_given_servers_counts_as_a_whole():
    """120 prompts of a second at once: two servers take 60 s, which one finds 30.5 s long."""
    ones = np.ones(120, dtype=np.int64)
    burst = Trace(arrival_s=np.arange(120) * 1e-9, prompt_tokens=100 * ones, output_tokens=ones)
    settings = SimulationSettings(trace=burst)
    request = asked(burst.rate_per_s, "ttft.p99=1s", simulation=settings, servers=2)
    found = simulate_option(request, settings, dataclasses.replace(CHOICE, gpus=2))
    assert (found.enough, found.tried_gpus, found.planned.gpus) == (None, 2, 2)
    assert found.planned.makespan_s == pytest.approx(60)
    assert found.planned.ttft.mean.value == pytest.approx(30.5)
    assert found.planned.utilisation == pytest.approx(1) and not found.planned.overloaded


def test_servers_that_were_dealt_in_turn_are_put_together():
    """Trace 0, 2 and 1, 3: one server idles for half of the time, one for all but 1 s."""
    results = []
    for arrivals, first_s, idle_s in (
        ([0.0, 4.0], 1.0, [[1.0, 3.0]]), ([2.0, 4.0], 1.5, [[0.0, 3.0], [3.5, 9.0]]),
    ):  # fmt: skip
        at_s, tokens = np.array(arrivals), {"prompt_tokens": [1, 1], "output_tokens": [1, 3]}
        times = {"admitted_s": at_s + 0.5, "first_s": at_s + first_s, "last_s": at_s + 2.0}
        trace = Trace(arrival_s=at_s, **{name: np.array(n) for name, n in tokens.items()})
        results.append(SimulationResult(requests=trace, **times, idle_s=np.array(idle_s), steps=1))
    found = gather(results)
    assert found.ttft_s.tolist() == [1.0, 1.5, 1.0, 1.5]
    assert found.waiting_s.tolist() == [0.5] * 4
    assert found.tpot_s.tolist() == [0.5, 0.25]
    assert found.utilisation == pytest.approx((2 / 4 + 0.5 / 4) / 2)
    assert found.running == pytest.approx(3 / 4 / 2)  # the last two begin after the window


@pytest.mark.slow
def test_a_shipped_plan_is_simulated_near_its_means():
    """Equal lengths; the plan's load is that of the next concurrency that was tried."""
    few = SimulationSettings(requests=300, variation=0.0)
    found = plan(conftest.asked(acceptance="gsm8k", simulation=few), SHIPPED)
    (simulated,) = found.simulated
    at_load = found.best.sizing.at_load
    assert simulated.planned.tpot.mean.value == pytest.approx(at_load.tpot_s, rel=0.15)
    assert simulated.planned.ttft.mean.value == pytest.approx(at_load.ttft_s, rel=0.25)
    assert simulated.planned.running < found.best.sizing.at_most.running


def test_simpy_is_asked_for_before_anything_is_planned(monkeypatch):
    monkeypatch.setitem(sys.modules, "simpy", None)
    with pytest.raises(InputError, match="needs simpy") as caught:
        plan(conftest.asked(simulation=SAMPLING), SHIPPED)
    assert "pip install 'rooftree[plan]'" in caught.value.hint
