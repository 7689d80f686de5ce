"""Steps of a planned server under the simulation: sums by hand, and what a cycle commits."""

import dataclasses
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.planning.batching import Overheads
from costmodel.planning.drafting import lookup_drafter
from costmodel.planning.engines import engine_rules
from costmodel.planning.forwards import ForwardSeconds
from costmodel.planning.simulation.steps import (
    StepGrid,
    committed_shares,
    exact_steps,
    speculation_of,
    step_grid,
)
from tests.costmodel.planning.conftest import (
    LINE_ACCEPTANCE,
    LLAMA,
    LineSteps,
    plain_steps,
    point,
    server_of,
)

POINTS = (point(1, "tree", 15, committed=4.0), point(4, "chain", 3, committed=2.5), point(8))
SERVER = server_of(
    LineSteps(key_s=1e-8), rules=engine_rules("vllm", "0.11"), acceptance=LINE_ACCEPTANCE,
    overheads=Overheads(layer_s=1e-5, prompt_layer_s=1e-4, step_s=1e-3, sequence_s=1e-4),
    drafter=dataclasses.replace(lookup_drafter(), host_s=0.0),
)  # fmt: skip


@given(mean=st.floats(1.0, 16.0), depth=st.integers(0, 15))
def test_shares_of_committed_tokens_have_the_mean(mean, depth):
    shares = np.array(committed_shares(mean, depth))
    assert shares.min() >= 0 and shares.sum() == pytest.approx(1)
    reachable = min(mean, depth + 1)
    assert shares @ np.arange(1, len(shares) + 1) == pytest.approx(reachable, abs=1e-9)


def test_a_chain_of_one_acceptance_is_exact_and_trees_are_those_of_the_concurrency():
    """0.8 a token, three drafted: 1, 2, 3 tokens at 0.2 x 0.8^k, all four at 0.8^3."""
    shares = committed_shares(1 + 0.8 + 0.8**2 + 0.8**3, 3)
    assert shares == pytest.approx((0.2, 0.16, 0.128, 0.512))
    speculation = speculation_of(POINTS, LINE_ACCEPTANCE)
    assert [speculation.level(batch) for batch in (1, 3, 4, 7, 8, 50)] == [0, 0, 1, 1, 2, 2]
    assert speculation.rows == (16, 4, 1)
    assert speculation.committed[-1] == (1.0,)


def test_a_step_by_hand_and_with_a_host_that_is_overlapped():
    """10 ms, 20 us a row, 10 ns a cached token; 10 us a layer, 1 ms a step and 0.1 ms a sequence
    for the engine; a prompt adds 0.1 ms a layer."""
    step_s = exact_steps(SERVER, POINTS)
    engine_s = 1e-5 * LLAMA.layers + 1e-3
    prompt_s = 100 * 20e-6 + 1e-4 * LLAMA.layers
    tree_s = 5e-6 + 15 * 5e-8
    assert step_s(2, 0, 500.0, 0.0) == pytest.approx(
        10e-3 + 2 * 16 * 20e-6 + 2 * 500 * 1e-8 + 2 * tree_s + engine_s + 2e-4
    )
    decode_s = 10e-3 + 8 * 20e-6 + 8 * 500 * 1e-8 + engine_s + 8e-4
    assert step_s(8, 0, 500.0, 0.0) == pytest.approx(decode_s)
    assert step_s(8, 100, 500.0, 50.0) == pytest.approx(decode_s + prompt_s + 100 * 50 * 1e-8)
    assert step_s(0, 100, 0.0, 0.0) == pytest.approx(prompt_s + engine_s)
    waits, hides = (
        plain_steps(LineSteps(), rules, Overheads(step_s=2e-3))(8, 0, 500.0, 0.0)
        for rules in (engine_rules("vllm", "0.11"), engine_rules("sglang"))
    )
    assert hides == pytest.approx(math.hypot(waits - 2e-3, 2e-3))


def test_the_grid_is_the_server_and_only_trees_pay_for_drafts():
    """Off the grid too: these steps are linear in all four within one tree."""
    exact, grid = exact_steps(SERVER, POINTS), step_grid(SERVER, POINTS, 3000)
    means = (200.0, 1234.0, 2999.0), (0.0, 700.0)
    for asked in itertools.product((1, 2, 3, 4, 6, 7, 8), (0, 1, 300, 5000), *means):
        assert grid(*asked) == pytest.approx(exact(*asked), rel=1e-9), asked
    half = SimpleNamespace(
        layers=0, host_s=0.0, draft_s=lambda *shape: ForwardSeconds(products=0.5)
    )
    slow = dataclasses.replace(SERVER, drafter=half)
    with_trees, plain = (exact_steps(slow, POINTS)(b, 0, 100.0, 0.0) for b in (1, 8))
    assert with_trees - exact_steps(SERVER, POINTS)(1, 0, 100.0, 0.0) == pytest.approx(0.5)
    assert plain == pytest.approx(exact_steps(SERVER, POINTS)(8, 0, 100.0, 0.0))


AXES = ((0, 1, 8, 64), (0, 512, 8192), (0, 1000, 20_000))


def trilinear(batch: float, prompt: float, context: float, keys: float = 0.0) -> float:
    """A function that interpolation in each axis reproduces everywhere."""
    tokens_s = 1e-9 * batch * context + 1e-12 * prompt * (context + 3 * keys)
    return 5e-3 + 1e-5 * batch + 2e-6 * prompt + tokens_s


def test_a_grid_is_trilinear_also_outside_and_asks_for_no_empty_step() -> None:
    grid = StepGrid(trilinear, *AXES)
    places = (1, 5, 64, 100), (0, 300, 512, 9000), (0.0, 17.5, 1e3, 3e4), (0.0, 0.5, 40.0)
    for place in itertools.product(*places):
        assert grid(*place) == pytest.approx(trilinear(*place), rel=1e-12), place
    # Prompts alone are interpolated from a step of one token.
    assert grid(0, 512, 0.0, 0.0) == pytest.approx(trilinear(0, 512, 0.0))
    between = (trilinear(0, 1, 0.0) + trilinear(0, 512, 0.0)) / 2
    assert grid(0, 256, 0.0, 0.0) == pytest.approx(between)
    grid = StepGrid(lambda b, p, *means: 3.0 - b, (0, 1, 2), (0,), (0,))
    assert grid(50, 0, 0.0, 0.0) == 1.0
    asked = []
    StepGrid(lambda b, p, *means: asked.append((b, p)) or 1.0, (0, 1), (0, 5), (0,))
    assert asked == 2 * [(0, 1), (0, 5), (1, 0), (1, 5)]
