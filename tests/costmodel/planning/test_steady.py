"""Steady state and memory of a server, against sums by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from costmodel.catalog import find_target
from costmodel.planning.batching import (
    Cycle,
    chunks_of,
    cycle_work,
    prompt_share,
    prompt_work,
    slowest_count,
)
from costmodel.planning.engines import (
    MemoryRule,
    ValueBytes,
    cache_bytes_per_token,
    engine_rules,
    weight_bytes,
)
from costmodel.planning.traffic import Traffic
from tests.costmodel.planning.conftest import LLAMA, LineSteps, server_of

VLLM, SGLANG = engine_rules("vllm"), engine_rules("sglang")


def test_a_token_waits_for_the_prompts_of_the_others_and_leaves_them_less_room():
    assert prompt_share(VLLM, 9, 400) == pytest.approx(8 / 400)
    assert prompt_share(SGLANG, 9, 400) == pytest.approx(4 / 400)
    assert prompt_share(VLLM, 1, 400) == 0
    assert chunks_of(VLLM, 8192, 64) == 2
    assert chunks_of(SGLANG, 8192, 64) == 1
    assert chunks_of(VLLM, 1000, 64) == 1


@pytest.mark.parametrize(("mean", "ranks"), [(0.03, 8), (1.5, 2), (40.0, 4)])
def test_the_rank_of_most_prompts_is_waited_for(mean, ranks):
    drawn = np.random.default_rng(1).poisson(mean, (200_000, ranks)).max(axis=1)
    assert slowest_count(mean, ranks) == pytest.approx(drawn.mean(), rel=0.02)
    assert slowest_count(mean, 1) == mean


def test_cached_prompts_are_not_computed_and_steps_depend_on_the_device():
    """A quarter of 8192 tokens in steps of 1024 beside 64 rows: 3 chunks, over 6144 cached."""
    rules = engine_rules("vllm", step_tokens=1024, prefix_hits=0.75)
    forward = LineSteps(key_s=1e-8)
    seconds, chunks = prompt_work(forward, rules, 8192, 64)
    whole_s = prompt_work(forward, VLLM, 8192, 64)[0]
    assert chunks == 3 and whole_s == pytest.approx(8192 * (20e-6 + 4096 * 1e-8))
    assert seconds == pytest.approx(2048 * (20e-6 + (6144 + 1024) * 1e-8))
    sizes = (("RTX 4090", 25e9), ("NVIDIA A100-SXM4-80GB", 85e9), ("NVIDIA H100 80GB HBM3", 85e9))
    steps = [engine_rules("vllm", device=device).step_tokens for device in sizes]
    assert steps == [2048, 2048, 8192]
    assert engine_rules("sglang", device=sizes[0]).step_tokens == 8192
    assert engine_rules("vllm", step_tokens=512, device=sizes[2]).step_tokens == 512


def test_steady_state_adds_up():
    traffic = Traffic(prompt_tokens=1024, output_tokens=500)
    work = cycle_work(LineSteps(), VLLM, traffic, 8, Cycle())
    assert (work.running, work.waiting) == (8, 0)
    assert work.prompts_s == pytest.approx(7 / 500 * 1024 * 20e-6)
    assert work.prompt_steps == pytest.approx(1 - math.exp(-7 / 500))  # some share a step
    assert work.attention_s == pytest.approx(8 * (1024 + 250) * 1e-8)


LARGE = find_target("meta-llama/Llama-3.1-70B-Instruct").architecture


def test_bytes_of_a_token_and_of_quantised_weights():
    """2 x 32 layers x 8 heads x 128 x 2 bytes; 80 layers for the 70B."""
    assert cache_bytes_per_token(LLAMA, ValueBytes()) == 131072
    assert cache_bytes_per_token(LLAMA, ValueBytes(cached=1)) == 65536
    assert cache_bytes_per_token(LARGE, ValueBytes()) == 327680
    assert cache_bytes_per_token(LARGE, ValueBytes(), 8) == 40960
    assert cache_bytes_per_token(LLAMA, ValueBytes(), 16) == 131072 / 8  # heads are never split
    embeddings = 2 * 128256 * 4096
    rest = 8030261248 - embeddings
    assert weight_bytes(LLAMA, ValueBytes(weight=1)) == rest + 2 * embeddings
    assert weight_bytes(LLAMA, ValueBytes(weight=0.5625)) == 0.5625 * rest + 2 * embeddings


def test_cache_tokens_of_both_rules_and_the_requests_that_they_hold():
    """80 GB: 0.9 x 80 - 16.06 - 3 GB, or 0.9 x (80 - 16.06 - 4 GB), over 131,072 bytes."""
    weights = 2 * 8030261248
    whole = MemoryRule(fraction=0.9, reserve_bytes=3e9)
    rest = MemoryRule(fraction=0.9, reserve_bytes=4e9, after_weights=True)
    servers = [server_of(LineSteps(), rules=replace(VLLM, memory=one)) for one in (whole, rest)]
    held = [server.cache_tokens() for server in servers]
    free_bytes = [72e9 - weights - 3e9, 0.9 * (76e9 - weights)]
    assert held == pytest.approx([one / 131072 for one in free_bytes])
    assert server_of(LineSteps(architecture=LARGE)).cache_tokens() == 0  # 141 GB of weights
    half = MemoryRule(fraction=0.9, reserve_bytes=0.0)
    whole = MemoryRule(fraction=0.9, reserve_bytes=0.0, whole_answer=True)
    assert half.tokens_held(1000, 400) == 1200
    assert whole.tokens_held(1000, 400) == 1400
