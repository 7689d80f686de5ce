"""Interpolated steps against the function they were taken from, server steps by hand."""

from __future__ import annotations

import math

import pytest

from costmodel.catalog import find_target
from costmodel.planning.batching import Overheads
from costmodel.planning.engines import engine_rules
from costmodel.planning.simulation.steps import Speculation, StepGrid
from tests.costmodel.planning.conftest import plain_steps

AXES = ((0, 1, 8, 64), (0, 512, 8192), (0, 1000, 20_000))


def trilinear(batch: float, prompt: float, context: float) -> float:
    """A function that interpolation in each axis reproduces everywhere."""
    return 5e-3 + 1e-5 * batch + 2e-6 * prompt + 1e-9 * batch * context + 1e-12 * prompt * context


@pytest.mark.parametrize("batch", [1, 5, 64, 100])
@pytest.mark.parametrize("prompt", [0, 300, 512, 9000])
@pytest.mark.parametrize("context", [0.0, 17.5, 1000.0, 30_000.0])
def test_a_grid_reproduces_a_trilinear_function_also_outside(batch, prompt, context) -> None:
    grid = StepGrid(trilinear, *AXES)
    assert grid(batch, prompt, context) == pytest.approx(
        trilinear(batch, prompt, context), rel=1e-12
    )


def test_prompts_alone_are_interpolated_from_a_step_of_one_token() -> None:
    grid = StepGrid(trilinear, *AXES)
    assert grid(0, 512, 0.0) == pytest.approx(trilinear(0, 512, 0.0))
    between = (trilinear(0, 1, 0.0) + trilinear(0, 512, 0.0)) / 2
    assert grid(0, 256, 0.0) == pytest.approx(between)


def test_beyond_a_falling_edge_no_step_is_shorter_than_the_shortest() -> None:
    grid = StepGrid(lambda b, p, c: 3.0 - b, (0, 1, 2), (0,), (0,))
    assert grid(50, 0, 0.0) == 1.0


def test_an_empty_step_is_never_asked_for() -> None:
    asked = []
    StepGrid(lambda b, p, c: asked.append((b, p)) or 1.0, (0, 1), (0, 5), (0,))
    assert asked == [(0, 1), (0, 5), (1, 0), (1, 5)]


def test_a_servers_steps_by_hand(line_steps) -> None:
    """10 ms and 20 us a row, 10 ns a cached token; a prompt 20 us a row."""
    target = find_target("meta-llama/Llama-3.1-8B-Instruct").architecture
    forward = line_steps(architecture=target)
    overheads = Overheads(layer_s=1e-4, prompt_layer_s=1e-3, step_s=2e-3, sequence_s=1e-4)
    step_s = plain_steps(forward, engine_rules("vllm"), overheads)
    host = 2e-3 + 8 * 1e-4
    decode = 10e-3 + 8 * 20e-6 + 8 * 500 * 1e-8 + 32 * 1e-4
    assert step_s(8, 0, 500.0) == pytest.approx(decode + host, rel=1e-6)
    prompt = 100 * 20e-6 + 32 * 1e-3
    assert step_s(8, 100, 500.0) == pytest.approx(decode + prompt + host, rel=1e-6)
    assert step_s(0, 100, 0.0) == pytest.approx(prompt + 32 * 1e-4 + 2e-3, rel=1e-6)


def test_an_engine_that_overlaps_its_host_hides_it(line_steps) -> None:
    target = find_target("meta-llama/Llama-3.1-8B-Instruct").architecture
    forward = line_steps(architecture=target)
    overheads = Overheads(step_s=2e-3)
    waits = plain_steps(forward, engine_rules("vllm"), overheads)(8, 0, 500.0)
    hides = plain_steps(forward, engine_rules("sglang"), overheads)(8, 0, 500.0)
    assert hides == pytest.approx(math.hypot(waits - 2e-3, 2e-3))


def test_the_entry_of_a_speculation_is_that_of_its_batch() -> None:
    two = Speculation(up_to=(4, 16), rows=(8, 1), committed=((0.5, 0.5), (1.0,)))
    assert [two.level(batch) for batch in (1, 4, 5, 16, 17, 1000)] == [0, 0, 1, 1, 1, 1]
