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
from costmodel.capacity.memory import largest_concurrency
from costmodel.capacity.steps import StepModel, StepSeconds
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
    `prompt_steps`: steps with a prompt in them, for each token; `host_s`: what the host does
    beside an engine's own work. Under speculation all of it is for one cycle, which commits
    several tokens.
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
    host_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """One round of every running sequence: rows verified, tokens committed, what a draft adds.

    A plain step verifies one row and commits one token.
    """

    nodes: int = 0
    committed: float = 1.0
    draft: StepSeconds = dataclasses.field(default_factory=StepSeconds)
    draft_layers: int = 0
    host_s: float = 0.0


def prompt_share(rules: EngineRules, running: float, output_tokens: float) -> float:
    """Prompts of other requests that one token waits for."""
    share = 1.0 if rules.mixes_prompts else IN_STEP_SHARE
    return share * max(running - 1.0, 0.0) / output_tokens


def chunks_of(rules: EngineRules, prompt_tokens: float, running: float) -> int:
    """Steps that a prompt is cut into: those that decode leave less room for it."""
    room = rules.step_tokens - (running if rules.mixes_prompts else 0.0)
    return max(1, math.ceil(prompt_tokens / max(room, 1.0)))


def steady_work(forward: StepModel, rules: EngineRules, workload: Workload) -> TokenWork:
    """The work of one token in steady state. Raises InputError where the weights do not fit."""
    w = workload
    tokens = rules.memory.cache_tokens(
        forward.architecture, forward.precision, forward.card.memory_bytes, forward.tensor_parallel
    )
    held = rules.memory.tokens_held(w.prompt_tokens, w.output_tokens)
    running = min(w.concurrency, largest_concurrency(tokens, held))
    work = cycle_work(forward, rules, dataclasses.replace(w, concurrency=running), Cycle())
    return dataclasses.replace(work, waiting=w.concurrency - running)


def cycle_work(
    forward: StepModel, rules: EngineRules, workload: Workload, cycle: Cycle
) -> TokenWork:
    """The work of one cycle in steady state, with all of `workload.concurrency` running."""
    w, running = workload, workload.concurrency
    chunks = chunks_of(rules, w.prompt_tokens, running * (cycle.nodes + 1))
    step = forward.decode(running, w.prompt_tokens + w.output_tokens / 2, cycle.nodes + 1)
    beside = running * (cycle.nodes + 1) if rules.mixes_prompts else 0.0
    prompt = forward.prompt(w.prompt_tokens, beside, chunks)
    share = cycle.committed * prompt_share(rules, running, w.output_tokens)
    return TokenWork(
        products_s=step.products + cycle.draft.products,
        attention_s=step.attention + cycle.draft.attention,
        all_reduce_s=step.all_reduce + cycle.draft.all_reduce,
        prompts_s=share * prompt.total,
        prompt_steps=share * chunks,
        layers=forward.architecture.layers + cycle.draft_layers,
        devices=forward.tensor_parallel,
        running=running,
        waiting=0.0,
        host_s=cycle.host_s,
    )
