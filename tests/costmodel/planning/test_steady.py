"""Steady state over made-up steps, against sums by hand."""

from __future__ import annotations

import dataclasses

import pytest

from costmodel.catalog import find_target
from costmodel.planning.batching import chunks_of, prompt_share
from costmodel.planning.engines import MemoryRule, engine_rules
from lab.studies.fit_overheads import ServerLoad, steady_work

LLAMA = find_target("meta-llama/Llama-3.1-8B-Instruct").architecture
VLLM, SGLANG = engine_rules("vllm"), engine_rules("sglang")


def test_a_token_waits_for_the_prompts_of_the_others():
    assert prompt_share(VLLM, 9, 400) == pytest.approx(8 / 400)
    assert prompt_share(SGLANG, 9, 400) == pytest.approx(4 / 400)
    assert prompt_share(VLLM, 1, 400) == 0


def test_decoding_leaves_less_room_for_a_prompt():
    assert chunks_of(VLLM, 8192, 64) == 2
    assert chunks_of(SGLANG, 8192, 64) == 1
    assert chunks_of(VLLM, 1000, 64) == 1


def test_steady_state_adds_up(line_steps):
    forward = line_steps(architecture=LLAMA)
    work = steady_work(
        forward, VLLM, ServerLoad(prompt_tokens=1024, output_tokens=500, concurrency=8)
    )
    assert (work.running, work.waiting) == (8, 0)
    assert work.prompts_s == pytest.approx(7 / 500 * 1024 * 20e-6)
    assert work.prompt_steps == pytest.approx(7 / 500)
    assert work.attention_s == pytest.approx(8 * (1024 + 250) * 1e-8)


def test_a_full_cache_limits_what_runs(line_steps):
    """16.06 GB of weights, 1.3 GB of cache: 10,000 tokens, 8 requests of 1024 + 400 / 2."""
    tight = dataclasses.replace(
        VLLM,
        memory=MemoryRule(
            fraction=(2 * 8030261248 + 10000 * 131072) / 80e9,
            reserve_bytes=0.0,
        ),
    )
    forward = line_steps(architecture=LLAMA)
    load = ServerLoad(prompt_tokens=1024, output_tokens=400, concurrency=32)
    work = steady_work(forward, tight, load)
    assert work.running == pytest.approx(10000 / 1224)
    assert work.waiting == pytest.approx(32 - 10000 / 1224)
