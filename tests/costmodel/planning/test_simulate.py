"""The simulated server: by hand, against a plain retelling of its rules, and against theory."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.errors import InputError
from costmodel.planning.batching import Cycle, Overheads, cycle_work
from costmodel.planning.engines import EngineRules, MemoryRule
from costmodel.planning.simulation.engine import SimulatedServer, simulate
from costmodel.planning.simulation.steps import Speculation, StepGrid
from costmodel.planning.traffic import LognormalLength, Trace, Traffic, poisson_trace
from tests.costmodel.planning import queueing
from tests.costmodel.planning.conftest import LineSteps, commits, plain_steps

ONE = LognormalLength(mean_tokens=1)
WHOLE = MemoryRule(fraction=1.0, reserve_bytes=0.0, whole_answer=True)


def made(arrival_s, prompt, output) -> Trace:
    arrival_s = np.array(arrival_s, dtype=float)
    return Trace(
        arrival_s=arrival_s, prompt_tokens=np.array(prompt), output_tokens=np.array(output)
    )


def server(cache=1e9, sequences=256, **rules) -> SimulatedServer:
    found = EngineRules(name="made up", memory=rules.pop("memory", WHOLE), **rules)
    return SimulatedServer(rules=found, cache_tokens=cache, max_sequences=sequences)


def step_s(batch: int, prompt_tokens: int, context: float, prompt_context: float = 0.0) -> float:
    """Sums that tell every step from every other, exact in binary fractions."""
    return 1.0 + batch / 4 + prompt_tokens / 64 + context / 1024


def constant(batch: int, prompt_tokens: int, context: float, prompt_context: float) -> float:
    return 1.0


def poisson_ones(rate: float, count: int, seed: int) -> Trace:
    return poisson_trace(rate, count, ONE, ONE, np.random.default_rng(seed))


def test_two_requests_by_hand_and_behind_a_front_end() -> None:
    """The second arrives in the first one's prompt, and is prefilled beside its decoding."""
    found = simulate(made([2.0, 2.5], [64, 128], [3, 2]), server(), step_s)
    first = 2.0 + (1 + 1)
    beside = first + (1 + 1 / 4 + 2 + 64 / 1024)
    both = beside + (1 + 2 / 4 + (65 + 128) / 2 / 1024)
    assert list(found.admitted_s) == [2.0, first]
    assert list(found.first_s) == [first, beside]
    assert list(found.last_s) == [both, both]
    assert list(found.tpot_s) == [(both - first) / 2, both - beside]
    assert found.idle_s.tolist() == [[0.0, 2.0]]
    assert found.steps == 3
    behind = dataclasses.replace(server(), front_s=0.5)
    for found, more_s in ((simulate(made([2, 9], [64, 64], [3, 2]), s, step_s), s.front_s)
                          for s in (server(), behind)):  # fmt: skip
        assert list(found.ttft_s) == [2 + more_s, 2 + more_s]
        assert list(found.tpot_s) == [1.25 + 64.5 / 1024, 1.25 + 64 / 1024]


@pytest.mark.parametrize("hits", [0.0, 0.25])
def test_a_chunk_attends_to_the_cache_of_its_own_prompt_alone(hits) -> None:
    """Prompts of 64 and 96 tokens in steps of 64, then both in one: pairs of token and key."""
    pairs = []

    def steps(batch: int, prompt_tokens: int, context: float, prompt_context: float) -> float:
        pairs.append(prompt_tokens * prompt_context)
        return 1.0

    def served(step_tokens: int) -> float:
        pairs.clear()
        limits = server(sequences=2, step_tokens=step_tokens, prefix_hits=hits)
        simulate(made([0, 0], [64, 96], [1, 1]), limits, steps)
        return sum(pairs)

    exact = (64**2 + 96**2) / 2 * (1 - hits**2)  # without what the cached ones attend to
    assert served(1000) == served(64) == exact
    assert hits or pairs == [64 * 32, 64 * 32, 32 * 80]


def test_requests_wait_for_cache_in_order_and_the_last_one_is_evicted() -> None:
    """The third would fit beside the first, but the second is before it."""
    found = simulate(made([0, 0, 0], [60, 60, 10], [5, 5, 5]), server(cache=100), constant)
    assert list(found.admitted_s) == [0.0, 5.0, 5.0]
    larger = dataclasses.replace(server(cache=100), held_tokens=lambda tokens: tokens + 40)
    found = simulate(made([0, 0], [40, 10], [5, 5]), larger, constant)  # with a state each
    assert list(found.admitted_s) == [0.0, 5.0]
    half = MemoryRule(fraction=1.0, reserve_bytes=0.0)
    found = simulate(made([0, 0], [40, 40], [20, 20]), server(cache=100, memory=half), constant)
    assert list(found.admitted_s) == [0.0, 0.0]
    # 6 of 10 tokens after the prompts, 12 after three steps: the second waits for the first
    grows = server(cache=10, memory=MemoryRule(fraction=1.0, reserve_bytes=0.0))
    seen = []

    def steps(batch: int, prompt_tokens: int, context: float, prompt_context: float) -> float:
        seen.append((batch, prompt_tokens))
        return 1.0

    found = simulate(made([0, 0], [3, 3], [5, 5]), grows, steps)
    assert seen == [(0, 6), (2, 0), (2, 0), (2, 0), (1, 0), (0, 7)]
    assert list(found.first_s) == [1.0, 1.0]
    assert list(found.last_s) == [5.0, 6.0]


def retold(requests: Trace, srv: SimulatedServer, tokens: int) -> tuple[list, list, list, int]:
    """The rules told plainly, looking at every request anew before every step."""
    rules, count = srv.rules, len(requests)
    arrival = requests.arrival_s.tolist()
    prompt, output = requests.prompt_tokens.tolist(), requests.output_tokens.tolist()
    admitted, first, last = [None] * count, [None] * count, [None] * count
    done_prompt, done_output = [0] * count, [0] * count
    now, steps = 0.0, 0
    while None in last:
        for i in range(count):
            if admitted[i] is not None:
                continue
            inside = [k for k in range(count) if admitted[k] is not None and last[k] is None]
            held = sum(prompt[k] + output[k] for k in [*inside, i])
            if arrival[i] > now or len(inside) >= srv.max_sequences or held > srv.cache_tokens:
                break
            admitted[i] = now
        inside = [k for k in range(count) if admitted[k] is not None and last[k] is None]
        if not inside:
            now = min(arrival[k] for k in range(count) if admitted[k] is None)
            continue
        prompts = [k for k in inside if done_prompt[k] < prompt[k]]
        decoding = [k for k in inside if done_prompt[k] == prompt[k]]
        if prompts and not rules.mixes_prompts:
            decoding = []
        room = rules.step_tokens - tokens * len(decoding)
        chunks = {}
        for k in prompts:
            chunks[k] = min(room, prompt[k] - done_prompt[k])
            room -= chunks[k]
        context = sum(prompt[k] + done_output[k] - 1 for k in decoding)
        mean_context = context / len(decoding) if decoding else 0.0
        now += step_s(len(decoding), sum(chunks.values()), mean_context)
        steps += 1
        for k in decoding:
            done_output[k] = min(done_output[k] + tokens, output[k])
        for k, chunk in chunks.items():
            done_prompt[k] += chunk
            if done_prompt[k] == prompt[k]:
                first[k], done_output[k] = now, 1
        for k in inside:
            if done_output[k] == output[k]:
                last[k] = now
    return admitted, first, last, steps


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30), st.integers(1, 12)), min_size=1,
             max_size=12),
    st.integers(42, 120), st.integers(1, 4), st.integers(13, 40), st.booleans(), st.integers(1, 3),
)  # fmt: skip
def test_the_server_follows_its_rules(lengths, cache, sequences, step_tokens, mixes, tokens):
    gaps, prompt, output = zip(*lengths, strict=True)
    requests = made(np.cumsum(gaps) / 8, prompt, output)
    srv = server(cache, sequences, step_tokens=step_tokens, mixes_prompts=mixes)
    always = commits(tokens, *[0.0] * (tokens - 1), 1.0)
    found = simulate(requests, srv, step_s, always, np.random.default_rng(0))
    admitted, first, last, steps = retold(requests, srv, tokens)
    assert found.admitted_s.tolist() == pytest.approx(admitted, rel=1e-12)
    assert found.first_s.tolist() == pytest.approx(first, rel=1e-12)
    assert found.last_s.tolist() == pytest.approx(last, rel=1e-12)
    assert found.steps == steps


def test_one_token_at_a_time_is_a_queue_with_one_server_and_one_that_grows_is_overloaded() -> None:
    """M/D/1: 40,000 requests, half of the time busy; mean and 99th percentile."""
    found = simulate(poisson_ones(0.5, 40_000, 3), server(sequences=1), constant)
    assert np.mean(found.waiting_s) == pytest.approx(0.5, rel=0.02)
    exact = queueing.md1_waiting_quantile_s(0.5, 1.0, 0.99)
    assert np.percentile(found.waiting_s, 99) == pytest.approx(exact, rel=0.03)
    arrivals_s = found.requests.arrival_s
    assert found.busy_share(arrivals_s[0], arrivals_s[-1]) == pytest.approx(0.5, abs=0.005)
    assert np.all(np.isnan(found.tpot_s))
    assert not found.overloaded
    assert simulate(poisson_ones(1.2, 5000, 0), server(sequences=1), constant).overloaded
    assert not simulate(poisson_ones(0.8, 5000, 0), server(sequences=1), constant).overloaded


def test_every_step_takes_as_long_as_that_of_the_slowest_rank() -> None:
    """The second rank's only request decodes beside the prompts of the first one's."""
    pair = dataclasses.replace(server(), ranks=2)
    found = simulate(made([0, 0, 2], [64, 64, 640], [2, 3, 1]), pair, step_s)
    beside = 2.0 + 1 + 1 / 4 + 10 + 64 / 1024  # the third request's prompt, and its rank decodes
    assert list(found.first_s) == [2.0, 2.0, beside]
    assert list(found.last_s) == [beside, beside + 1 + 1 / 4 + 65 / 1024, beside]


@pytest.mark.parametrize(
    ("ranks", "settings"), [(1, {}), (4, {}), (1, {"prefix_hits": 0.8}), (1, {"step_tokens": 128})]
)
def test_the_closed_form_of_a_steady_server_is_met(ranks, settings) -> None:
    """A backlog that keeps 8 requests in flight; the planner's formula knows mean lengths only."""
    forward = LineSteps(ranks=ranks, key_s=3e-7 / ranks)
    overheads = Overheads(layer_s=2e-5, prompt_layer_s=1e-4, step_s=1e-3, sequence_s=3e-5)
    rules = EngineRules(name="made up", memory=WHOLE, **settings)
    exact = plain_steps(forward, rules, overheads)
    grid = StepGrid(exact, (0, 1, 8), (0, 1, 64, 128, 1024, 8192), (0, 1000), 500)
    output = np.random.default_rng(2).integers(100, 301, size=1500)
    requests = made(np.zeros(1500), np.full(1500, 500), output)
    served = dataclasses.replace(server(sequences=8), rules=rules, ranks=ranks)
    found = simulate(requests, served, grid)
    kept = slice(100, -100)
    spent_s = np.sum((found.last_s - found.first_s)[kept])
    traffic = Traffic(prompt_tokens=500, output_tokens=200)
    work = cycle_work(forward, rules, traffic, 8, Cycle())
    expected = overheads.time_per_token_s(work, overlaps_host=rules.overlaps_host)
    assert spent_s / np.sum(output[kept] - 1) == pytest.approx(expected, rel=0.02)


def test_speculation_divides_the_time_a_token_and_the_tree_is_that_of_the_batch() -> None:
    requests = made(np.arange(200) * 2000.0, [5] * 200, [1000] * 200)
    shares = commits(8, 0.4, 0.3, 0.2, 0.1)
    found = simulate(requests, server(), constant, shares, np.random.default_rng(1))
    assert np.mean(found.tpot_s) == pytest.approx(1 / 2.0, rel=0.01)
    # Two tokens a step alone, one beside another request
    by_batch = Speculation(up_to=(1, 9), rows=(2, 1), committed=((0.0, 1.0), (1.0,)))
    generator = np.random.default_rng(0)
    found = simulate(made([0, 0], [1, 1], [7, 3]), server(), constant, by_batch, generator)
    assert list(found.last_s) == [5.0, 3.0]  # 1 + 1 + 1 beside, then 2 + 2


@pytest.mark.parametrize(("given", "message", "speculation"), [
    ({"cache": 100}, r"2 \(90 prompt and 20 answer tokens\) never fits into a cache of 100", ()),
    ({"step_tokens": 256}, "256 decoded rows leave no room for prompts in steps of 256", ()),
    ({"step_tokens": 900}, "1024 decoded rows", (commits(4, 1.0),)),
])  # fmt: skip
def test_bad_input_is_named(given, message, speculation) -> None:
    with pytest.raises(InputError, match=message):
        simulate(made([0, 1], [5, 90], [5, 20]), server(**given), constant, *speculation)
