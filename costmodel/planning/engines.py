"""Serving engines: memory use and scheduling rules that decide latency."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import NamedTuple

from costmodel.architecture import ModelArchitecture
from costmodel.errors import InputError
from costmodel.io import read_yaml, shipped_directory


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ValueBytes:
    """Bytes of one weight of the layers, of embedding and LM head, of a cached value and others."""

    weight: float = 2.0
    embedding: float = 2.0
    cached: float = 2.0
    other: float = 2.0


def weight_bytes(
    architecture: ModelArchitecture, value: ValueBytes, tensor_parallel: int = 1
) -> float:
    a = architecture
    embeddings = a.vocab * a.hidden * (1 if a.tied else 2)
    rest = a.parameters - embeddings
    return (rest * value.weight + embeddings * value.embedding) / tensor_parallel


def cache_bytes_per_token(
    architecture: ModelArchitecture, value: ValueBytes, tensor_parallel: int = 1
) -> float:
    """Bytes of one token's cache on one device; a head is never split, nor a latent vector.

    Layers without keys of their own do not count; those with a window count like the others.
    """
    return _values(architecture, 1, 1, tensor_parallel) * value.cached


def sequence_bytes(
    architecture: ModelArchitecture,
    tokens: float,
    value: ValueBytes,
    tensor_parallel: int = 1,
    *,
    drops: bool = True,
) -> float:
    """Bytes of one sequence's cache and recurrent states on one device.

    drops  the engine keeps nothing that has left a window
    """
    a = architecture
    seen = min(tokens, a.sliding_window or tokens) if drops else tokens
    states = a.state_bytes(value.other) / tensor_parallel
    return _values(a, tokens, seen, tensor_parallel) * value.cached + states


def _values(a: ModelArchitecture, tokens: float, seen: float, tensor_parallel: int) -> float:
    """Values on one device of layers that keep all `tokens`, and that keep `seen` of a window."""

    def share(heads: int) -> float:
        return 1.0 if a.latent_rank else max(heads / tensor_parallel, 1.0) / heads

    full, windowed = a.kept_layers
    whole = full * share(a.full_kv_heads or a.kv_heads) * a.full_cached_width + a.index_values
    return whole * tokens + windowed * share(a.kv_heads) * a.cached_width * seen


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRule:
    """Memory that an engine gives to the cache, and cached tokens that it counts for a request.

    The engine uses `fraction` of the device's memory, or, with `after_weights`, of the memory
    that weights and `reserve_bytes` leave. With `whole_answer` a request is admitted only if its
    whole answer fits; otherwise when its prompt fits, and it holds half of its answer on average.
    With `drops` a layer with a window keeps nothing that has left it. `sets_aside`: it keeps room
    for its largest step's activations beside the reserve, which holds them otherwise.
    """

    fraction: float
    reserve_bytes: float
    sets_aside: bool = False
    after_weights: bool = False
    whole_answer: bool = False
    drops: bool = True

    def activation_bytes(
        self, architecture: ModelArchitecture, step_tokens: int, tensor_parallel: int = 1
    ) -> float:
        """Bytes of the largest step's widest values in 16 bits, and of its samplers' in 32.

        Of an FFN: its input, gate and up, and their product; logits of _SAMPLED sequences twice.
        """
        a = architecture
        if not self.sets_aside:
            return 0.0
        width = max(a.active_experts * a.expert_ffn + a.shared_ffn, 0 if a.experts else a.ffn)
        step = 2 * step_tokens * (4 * a.hidden + a.ffn_matrices * width / tensor_parallel)
        return step + 2 * 4 * _SAMPLED * a.vocab

    def free_bytes(self, memory_bytes: float, weights_bytes: float) -> float:
        """Bytes left for the cache beside the weights; negative where the weights do not fit."""
        if self.after_weights:
            return self.fraction * (memory_bytes - weights_bytes - self.reserve_bytes)
        return self.fraction * memory_bytes - weights_bytes - self.reserve_bytes

    def tokens_held(self, prompt_tokens: float, output_tokens: float) -> float:
        """Cached tokens of one running request, on average."""
        return prompt_tokens + output_tokens * (1.0 if self.whole_answer else 0.5)


# vLLM's largest step, if none is asked for, on devices below 70 GiB and on A100s.
_LARGE_BYTES, _SMALL_STEP_TOKENS = 70 * 2**30, 2048
_SAMPLED = 256  # sequences of the profiling step, max_num_seqs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineRules:
    """Scheduling rules of one engine.

    `mixes_prompts`: one step decodes and prefills; otherwise decoding waits for all prompts.
    `overlaps_host`: the host prepares a step while the device runs the one before it.
    `step_tokens`: largest number of tokens in a step; longer prompts are cut into chunks.
    `prefix_hits`: share of a prompt's tokens that are cached before it comes, and not computed.
    Each request is taken to hold all of its tokens, as if no two that run shared them.
    `verifies_trees`: a verification may hold a draft tree, not only a chain.
    """

    name: str
    memory: MemoryRule
    mixes_prompts: bool = True
    overlaps_host: bool = True
    step_tokens: int = 8192
    prefix_hits: float = 0.0
    verifies_trees: bool = False


class EngineVersion(NamedTuple):
    """The versions of an engine that are planned alike.

    since          the first of them
    planned_as     the version whose servers gave its host's times (calibrations/engines.yaml)
    overlaps_host  the host prepares a step while the device runs the one before it
    """

    since: str
    planned_as: str
    overlaps_host: bool


_SCHEDULERS = read_yaml(shipped_directory() / "schedulers.yaml")
RULES = {
    name: EngineRules(name=name, memory=MemoryRule(**row["memory"]), **row.get("rules", {}))
    for name, row in _SCHEDULERS.items()
}
VERSIONS = {
    name: tuple(EngineVersion(**version) for version in row["versions"])
    for name, row in _SCHEDULERS.items()
    if "versions" in row
}


def planned_version(name: str, version: str) -> EngineVersion | None:
    """How a version of an engine is planned; the newest where none is named.

    None for an engine without versions. Raises InputError.
    """
    versions = VERSIONS.get(name, ())
    if not version:
        return versions[-1] if versions else None
    if not versions or not re.fullmatch(r"\d+(\.\d+)*", version):
        raise InputError(
            f"no version '{version}' of {name} is planned",
            hint=f"Write {name}@{versions[-1].planned_as}" if versions else "Leave the version out",
        )

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(".")]

    below = [one for one in versions if numbers(one.since) <= numbers(version)]
    return below[-1] if below else versions[0]


def engine_rules(
    name: str, version: str = "", *, async_scheduling: bool | None = None,
    step_tokens: int | None = None, prefix_hits: float = 0.0,
    device: tuple[str, float] = ("", math.inf),
) -> EngineRules:  # fmt: skip
    """The rules of an engine's version on a device (name, bytes of memory).

    `async_scheduling` and `step_tokens` override its defaults. Raises InputError.
    """
    if name not in RULES:
        raise InputError(f"no engine is called '{name}'", hint=f"Use one of: {', '.join(RULES)}")
    rules = RULES[name]
    if async_scheduling is None:
        planned = planned_version(name, version)
        async_scheduling = rules.overlaps_host if planned is None else planned.overlaps_host
    if step_tokens is None:
        small = name == "vllm" and (device[1] < _LARGE_BYTES or "A100" in device[0])
        step_tokens = _SMALL_STEP_TOKENS if small else rules.step_tokens
    return dataclasses.replace(
        rules, overlaps_host=async_scheduling, step_tokens=step_tokens, prefix_hits=prefix_hits
    )
