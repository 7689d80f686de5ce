"""Steps and steady state over made-up tables, against sums by hand."""

from __future__ import annotations

import dataclasses

import pytest

from costmodel.catalog import find_target
from costmodel.errors import InputError
from costmodel.planning.batching import chunks_of, prompt_share
from costmodel.planning.engines import MemoryRule, engine_rules
from costmodel.planning.forwards import ServingForward
from lab.studies.fit_overheads import ServerLoad, steady_work

LLAMA = find_target("meta-llama/Llama-3.1-8B-Instruct").architecture
VLLM, SGLANG = engine_rules("vllm"), engine_rules("sglang")


def test_a_decode_step_is_four_products_a_layer_and_the_head(tables):
    step = ServingForward(architecture=LLAMA, tables=tables).decode(8, 1000)
    assert step.products == pytest.approx((32 * 4 + 1) * (1e-3 + 8e-6))
    assert step.attention == pytest.approx(32 * 8e-3)
    assert step.all_reduce == 0
    assert step.total == pytest.approx(step.products + step.attention)


def test_a_prompt_beside_decoding_reads_no_weights_again(tables):
    forward = ServingForward(architecture=LLAMA, tables=tables)
    alone, beside = forward.prompt(1024, 0, 1), forward.prompt(1024, 8, 1)
    assert alone.products == pytest.approx(32 * 4 * (1e-3 + 1024e-6))
    assert beside.products == pytest.approx(32 * 4 * 1024e-6)
    assert beside.attention == alone.attention == pytest.approx(32 * 1024e-6)


def test_a_prompt_in_chunks_pays_for_each(tables):
    forward = ServingForward(architecture=LLAMA, tables=tables)
    assert forward.prompt(1024, 0, 4).products == pytest.approx(32 * 4 * (4e-3 + 1024e-6))


def test_two_devices_take_the_faster_all_reduce_twice_a_layer(tables):
    attention = dataclasses.replace(
        tables.attention,
        generation={(16, 4): tables.attention.generation[32, 8]},
        context={(16, 4): tables.attention.context[32, 8]},
    )
    halves = dataclasses.replace(tables, attention=attention)
    step = ServingForward(architecture=LLAMA, tables=halves, tensor_parallel=2).decode(8, 1000)
    assert step.all_reduce == pytest.approx(2 * 32 * 1e-6)
    with pytest.raises(InputError, match=r"all-reduces of 4 .* were not measured"):
        ServingForward(architecture=LLAMA, tables=halves, tensor_parallel=4).decode(8, 1000)


def test_the_cache_is_read_no_faster_than_memory(tables):
    slow = dataclasses.replace(
        tables,
        attention=dataclasses.replace(
            tables.attention, generation={(32, 8): {(1, 1): 1e-12, (256, 1): 1e-12}}
        ),
    )
    step = ServingForward(architecture=LLAMA, tables=slow).decode(64, 4096)
    assert step.attention == pytest.approx(64 * 4096 * 131072 / slow.read_bytes_per_s)


def test_impossible_splits_are_refused(tables):
    with pytest.raises(InputError, match="tensor_parallel 3 does not divide"):
        ServingForward(architecture=LLAMA, tables=tables, tensor_parallel=3)
    experts = find_target("Qwen/Qwen3-30B-A3B").architecture
    with pytest.raises(InputError, match="a mixture of experts needs a profile"):
        ServingForward(architecture=experts, tables=tables)


def test_a_token_waits_for_the_prompts_of_the_others():
    assert prompt_share(VLLM, 9, 400) == pytest.approx(8 / 400)
    assert prompt_share(SGLANG, 9, 400) == pytest.approx(4 / 400)
    assert prompt_share(VLLM, 1, 400) == 0


def test_decoding_leaves_less_room_for_a_prompt():
    assert chunks_of(VLLM, 8192, 64) == 2
    assert chunks_of(SGLANG, 8192, 64) == 1
    assert chunks_of(VLLM, 1000, 64) == 1


def test_steady_state_adds_up(tables):
    forward = ServingForward(architecture=LLAMA, tables=tables)
    work = steady_work(
        forward, VLLM, ServerLoad(prompt_tokens=1024, output_tokens=500, concurrency=8)
    )
    assert (work.running, work.waiting) == (8, 0)
    assert work.prompts_s == pytest.approx(7 / 500 * 32 * (4 * 1024e-6 + 1024e-6))
    assert work.prompt_steps == pytest.approx(7 / 500)
    assert work.attention_s == pytest.approx(32 * 8e-3)


def test_a_full_cache_limits_what_runs(tables):
    """16.06 GB of weights, 1.3 GB of cache: 10,000 tokens, 8 requests of 1024 + 400 / 2."""
    tight = dataclasses.replace(
        VLLM,
        memory=MemoryRule(
            fraction=(2 * 8030261248 + 10000 * 131072) / tables.device.memory_bytes,
            reserve_bytes=0.0,
        ),
    )
    forward = ServingForward(architecture=LLAMA, tables=tables)
    load = ServerLoad(prompt_tokens=1024, output_tokens=400, concurrency=32)
    work = steady_work(forward, tight, load)
    assert work.running == pytest.approx(10000 / 1224)
    assert work.waiting == pytest.approx(32 - 10000 / 1224)


def test_impossible_workloads_are_refused():
    with pytest.raises(InputError, match="concurrency must be a number of at least 1"):
        ServerLoad(prompt_tokens=10, output_tokens=10, concurrency=0)
    with pytest.raises(InputError, match="no engine is called 'tgi'"):
        engine_rules("tgi")


def test_asynchronous_scheduling_is_a_choice():
    assert not engine_rules("vllm").overlaps_host
    assert engine_rules("vllm", async_scheduling=True).overlaps_host
