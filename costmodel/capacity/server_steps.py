"""Steps of a planned server as the simulation wants them: seconds, and what a verification commits.

The tree is that of the plan: the best at the largest planned concurrency that the batch reaches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache

from scipy.optimize import brentq

from costmodel.capacity.acceptance_data import BLOCK_GAMMA, Acceptance
from costmodel.capacity.operating import OperatingPoint, Server
from costmodel.capacity.steady import TokenWork
from costmodel.capacity.step_times import Speculation, StepGrid, StepTime
from costmodel.capacity.steps import StepSeconds

_PROMPT_TOKENS = (0, 1, 64, 256, 512, 1024, 2048, 4096)
_CONTEXT_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)


def speculation_of(points: Sequence[OperatingPoint], acceptance: Acceptance | None) -> Speculation:
    """The trees of `points` (concurrencies ascending from 1) and what they commit."""
    ends = [later.running - 1 for later in points[1:]] + [points[-1].running]
    return Speculation(
        up_to=tuple(ends),
        rows=tuple(point.nodes + 1 for point in points),
        committed=tuple(
            committed_shares(point.committed, _depth(point, acceptance)) for point in points
        ),
    )


def _depth(point: OperatingPoint, acceptance: Acceptance | None) -> int:
    """Drafted tokens that can be committed at most: the block's, and no more than nodes."""
    chain = len(acceptance.chain) - 1 if acceptance is not None else 0
    return min(point.nodes, max(chain or BLOCK_GAMMA, math.ceil(point.committed) - 1))


def committed_shares(mean: float, depth: int) -> tuple[float, ...]:
    """Probabilities of 1, 2, ... depth + 1 tokens with this mean.

    One acceptance for all depths: exact for a chain of constant acceptance, for a tree the
    simplest that has its mean. Answers take many rounds, so the mean is what matters.
    """
    if depth == 0 or mean <= 1.0:
        return (1.0,)

    def excess(rate: float) -> float:
        return sum(rate**level for level in range(depth + 1)) - mean

    rate = 1.0 if excess(1.0) <= 0 else float(brentq(excess, 0.0, 1.0, xtol=1e-14))
    reached = [rate**level for level in range(depth + 1)] + [0.0]
    return tuple(here - further for here, further in itertools.pairwise(reached))


def server_steps(server: Server, points: Sequence[OperatingPoint]) -> StepTime:
    """Seconds of a step of the server with the trees of `points`: exact, and slow."""
    speculation = speculation_of(points, server.acceptance)

    @cache
    def cycle(batch: int, context: float) -> tuple[StepSeconds, StepSeconds]:
        """Verification and draft, which are the same beside every prompt."""
        point, forward = points[speculation.level(batch)], server.forward
        if not batch:
            return StepSeconds(), StepSeconds()
        verify = forward.decode(batch, context, point.nodes + 1)
        if server.drafter is None or not point.nodes:
            return verify, StepSeconds()
        return verify, server.drafter.draft_s(forward, batch, context)

    @cache
    def prompts(tokens: int, beside: int) -> float:
        return server.forward.prompt(tokens, beside, 1).total if tokens else 0.0

    def seconds(batch: int, prompt_tokens: int, context: float) -> float:
        point, forward = points[speculation.level(batch)], server.forward
        drafter = server.drafter if point.nodes and batch else None
        verify, draft = cycle(batch, context)
        work = TokenWork(
            products_s=verify.products + draft.products,
            attention_s=verify.attention + draft.attention,
            all_reduce_s=verify.all_reduce + draft.all_reduce,
            prompts_s=prompts(prompt_tokens, batch * (point.nodes + 1)),
            prompt_steps=1.0 if prompt_tokens else 0.0,
            layers=forward.architecture.layers + (drafter.layers if drafter else 0),
            devices=forward.tensor_parallel,
            running=float(batch),
            waiting=0.0,
            host_s=batch * server.tree_s(point.shape, point.nodes) if drafter else 0.0,
        )
        return server.overheads.time_per_token_s(work, overlaps_host=server.rules.overlaps_host)

    return seconds


def step_grid(server: Server, points: Sequence[OperatingPoint], longest: int) -> StepGrid:
    """The same, interpolated between precomputed steps; quick. `longest`: tokens of a request.

    Both ends of every tree's batches are on the grid, so that nothing is interpolated from one
    tree to the next.
    """
    ends = {0} | {point.running for point in points}
    ends |= {later.running - 1 for later in points[1:]}
    step_tokens = server.rules.step_tokens
    prompts = [n for n in _PROMPT_TOKENS if n < step_tokens] + [step_tokens]
    contexts = sorted({max(round(share * longest), 1) for share in _CONTEXT_SHARES})
    return StepGrid.of(server_steps(server, points), sorted(ends), prompts, contexts)
