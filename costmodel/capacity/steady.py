"""Steady-state continuous batching: what one token of an answer waits for.

A closed loop keeps C requests in flight, each of p prompt and o answer tokens. B of them run at
once, fewer than C where the cache does not hold more. While one request decodes its o tokens, each
of the other B - 1 is replaced once, so that every token waits for (B - 1) / o prompts.

Engines that never mix prompts and decoding keep equal requests in step: all B prompts are
prefilled before any of them decodes on, so that a request waits, after its own first token, for
half of them on average. With unequal lengths the whole of it would be right.
"""

from __future__ import annotations

import dataclasses
import math

from costmodel.capacity.engines import EngineRules
from costmodel.capacity.forward import ServingForward
from costmodel.capacity.memory import largest_concurrency
from costmodel.errors import InputError

# Of the other requests' prompts, those that come after a request's own while all are in step.
IN_STEP_SHARE = 0.5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests of one size: mean prompt and answer tokens, and how many are kept in flight."""

    prompt_tokens: float
    output_tokens: float
    concurrency: float

    def __post_init__(self) -> None:
        for field in ("prompt_tokens", "output_tokens", "concurrency"):
            value = getattr(self, field)
            if not 1 <= value < math.inf:
                raise InputError(f"{field} must be a number of at least 1 (is {value!r})")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenWork:
    """What one token of an answer takes: kernel seconds by kind, and what overheads scale with.

    `running`: requests that run at once; `waiting`: those of the closed loop that do not fit;
    `prompt_steps`: steps with a prompt in them, for each token.
    """

    products_s: float
    attention_s: float
    all_reduce_s: float
    prompts_s: float
    prompt_steps: float
    layers: int
    devices: int
    running: float
    waiting: float


def prompt_share(rules: EngineRules, running: float, output_tokens: float) -> float:
    """Prompts of other requests that one token waits for."""
    share = 1.0 if rules.mixes_prompts else IN_STEP_SHARE
    return share * max(running - 1.0, 0.0) / output_tokens


def chunks_of(rules: EngineRules, prompt_tokens: float, running: float) -> int:
    """Steps that a prompt is cut into: those that decode leave less room for it."""
    room = rules.step_tokens - (running if rules.mixes_prompts else 0.0)
    return max(1, math.ceil(prompt_tokens / max(room, 1.0)))


def steady_work(forward: ServingForward, rules: EngineRules, workload: Workload) -> TokenWork:
    """The work of one token in steady state. Raises InputError where the weights do not fit."""
    w, a, tp = workload, forward.architecture, forward.tensor_parallel
    tokens = rules.memory.cache_tokens(
        a, forward.tables.precision, forward.tables.device.memory_bytes, tp
    )
    held = rules.memory.tokens_held(w.prompt_tokens, w.output_tokens)
    running = min(w.concurrency, largest_concurrency(tokens, held))
    chunks = chunks_of(rules, w.prompt_tokens, running)
    decode = forward.decode(running, w.prompt_tokens + w.output_tokens / 2)
    beside = running if rules.mixes_prompts else 0.0
    prompt = forward.prompt(w.prompt_tokens, beside, chunks)
    share = prompt_share(rules, running, w.output_tokens)
    return TokenWork(
        products_s=decode.products,
        attention_s=decode.attention,
        all_reduce_s=decode.all_reduce,
        prompts_s=share * prompt.total,
        prompt_steps=share * chunks,
        layers=a.layers,
        devices=tp,
        running=running,
        waiting=w.concurrency - running,
    )
