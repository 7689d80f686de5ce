"""How serving engines schedule, as far as it decides their latency."""

from __future__ import annotations

import dataclasses

from costmodel.capacity.memory import MemoryRule
from costmodel.errors import InputError

_GB = 1e9


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineRules:
    """One engine's scheduler.

    `mixes_prompts`: a step decodes while it prefills; otherwise decoding waits until no prompt
    does. `overlaps_host`: the host prepares a step while the device runs the one before it.
    `step_tokens`: tokens of one step at most, so longer prompts are cut into chunks.
    """

    name: str
    memory: MemoryRule
    mixes_prompts: bool = True
    overlaps_host: bool = True
    step_tokens: int = 8192


# Defaults as the engines document them: vLLM gpu_memory_utilization 0.9, prompts in chunks of
# 8192 tokens, scheduling on the host between steps unless --async-scheduling; SGLang
# mem_fraction_static 0.88, chunked_prefill_size 8192, no mixed chunks, overlap schedule;
# TensorRT-LLM free_gpu_memory_fraction 0.9 of what is left, overlap scheduler, no eviction.
# What a running engine needs beside weights and cache is a round guess of 2 to 4 GB.
# rooftree is this project's decoder: one loop that prepares, launches and waits.
RULES = {
    "trtllm": EngineRules(
        name="trtllm",
        memory=MemoryRule(
            fraction=0.9, reserve_bytes=4 * _GB, after_weights=True, whole_answer=True
        ),
    ),
    "vllm": EngineRules(
        name="vllm",
        memory=MemoryRule(fraction=0.9, reserve_bytes=3 * _GB),
        overlaps_host=False,
    ),
    "sglang": EngineRules(
        name="sglang",
        memory=MemoryRule(fraction=0.88, reserve_bytes=2 * _GB),
        mixes_prompts=False,
    ),
    "rooftree": EngineRules(
        name="rooftree",
        memory=MemoryRule(fraction=0.9, reserve_bytes=1 * _GB),
        mixes_prompts=False,
        overlaps_host=False,
    ),
}


def engine_rules(name: str, *, async_scheduling: bool | None = None) -> EngineRules:
    """The rules of one engine; `async_scheduling` overrides its default. Raises InputError."""
    if name not in RULES:
        raise InputError(f"no engine is called '{name}'", hint=f"Use one of: {', '.join(RULES)}")
    rules = RULES[name]
    if async_scheduling is None:
        return rules
    return dataclasses.replace(rules, overlaps_host=async_scheduling)
