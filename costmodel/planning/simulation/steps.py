"""Steps of a simulated server: their seconds, and the tokens that a verification commits.

A batch uses the tree that the plan chose at the largest number of requests not above the batch.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache

from costmodel.acceptance import BLOCK_GAMMA
from costmodel.planning.acceptance import Acceptance
from costmodel.planning.batching import Cycle, step_work, verification_s
from costmodel.planning.forwards import ForwardSeconds
from costmodel.planning.servers import OperatingPoint, Server

# (batch, prompt_tokens, context, prompt_context) -> seconds of a step. It decodes `batch` sequences
# with a mean of `context` cached tokens, and prefills `prompt_tokens`, each of which attends to
# `prompt_context` keys on average. Not both of the first two may be 0.
StepTime = Callable[[int, int, float, float], float]


class StepGrid:
    """A StepTime interpolated linearly between precomputed steps of a slow one, `step_s`.

    Each axis ascends. Beyond an axis the line through its last two points is extended. No time is
    below the smallest one of the grid. An empty step gets the time of one prompt token. Between
    prompts that attend to no key and to `most_keys` each, time is a line.
    """

    def __init__(
        self,
        step_s: StepTime,
        batches: Sequence[int],
        prompt_tokens: Sequence[int],
        contexts: Sequence[float],
        most_keys: float = 1.0,
    ) -> None:
        self.axes, self._most_keys = (batches, prompt_tokens, contexts), most_keys
        # Plain lists: a scalar of a numpy array costs ten times as much to read.
        self._alone, self._behind = (
            [
                [[step_s(b, p if b or p else 1, c, keys) for c in contexts] for p in prompt_tokens]
                for b in batches
            ]
            for keys in (0.0, most_keys)
        )
        self._least_s = min(s for plane in self._alone for row in plane for s in row)

    def __call__(
        self, batch: int, prompt_tokens: int, context: float, prompt_context: float
    ) -> float:
        batches, prompts, contexts = self.axes
        i, u = _place(batches, batch)
        j, v = _place(prompts, prompt_tokens)
        k, w = _place(contexts, context)

        def between(planes: list[list[list[float]]]) -> float:
            seconds = _bilinear(planes[i], j, v, k, w)
            return seconds + u * (_bilinear(planes[i + 1], j, v, k, w) - seconds) if u else seconds

        seconds = between(self._alone)
        if prompt_tokens:
            seconds += prompt_context / self._most_keys * (between(self._behind) - seconds)
        return seconds if seconds > self._least_s else self._least_s


def _place(axis: Sequence[float], value: float) -> tuple[int, float]:
    """The cell of a value and its position in it, 0 to 1; beyond that outside of the axis."""
    if len(axis) == 1:
        return 0, 0.0
    i = min(max(bisect.bisect_right(axis, value) - 1, 0), len(axis) - 2)
    return i, (value - axis[i]) / (axis[i + 1] - axis[i])


def _bilinear(plane: list[list[float]], j: int, v: float, k: int, w: float) -> float:
    row = plane[j]
    seconds = row[k] + w * (row[k + 1] - row[k]) if w else row[k]
    if v:
        row = plane[j + 1]
        next_s = row[k] + w * (row[k + 1] - row[k]) if w else row[k]
        seconds += v * (next_s - seconds)
    return seconds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Distribution of committed tokens, by batch.

    Entry i holds for batches up to `up_to[i]`, the last one for all larger ones. `rows` are the
    rows that one sequence verifies in a step (tree nodes + 1); `committed[i][n]` is the probability
    of n + 1 tokens. The StepTime used with it must be that of the same rows.
    """

    up_to: tuple[int, ...]
    rows: tuple[int, ...]
    committed: tuple[tuple[float, ...], ...]

    def level(self, batch: int) -> int:
        return min(bisect.bisect_left(self.up_to, batch), len(self.up_to) - 1)


PLAIN = Speculation(up_to=(1,), rows=(1,), committed=((1.0,),))
_PROMPT_TOKENS = (0, 1, 64, 256, 512, 1024, 2048, 4096)
_CONTEXT_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)


def speculation_of(points: Sequence[OperatingPoint], acceptance: Acceptance | None) -> Speculation:
    """Trees and committed tokens of `points`, whose `running` ascends from 1."""
    ends = [later.running - 1 for later in points[1:]] + [points[-1].running]
    chain = (len(acceptance.chain) - 1 if acceptance is not None else 0) or BLOCK_GAMMA
    # A cycle commits at most the block's length, or the nodes if fewer.
    shares = (
        committed_shares(p.committed, min(p.nodes, max(chain, math.ceil(p.committed) - 1)))
        for p in points
    )
    rows = tuple(point.nodes + 1 for point in points)
    return Speculation(up_to=tuple(ends), rows=rows, committed=tuple(shares))


def committed_shares(mean: float, depth: int) -> tuple[float, ...]:
    """Probabilities of 1, 2, ... depth + 1 committed tokens with this mean.

    They follow from one acceptance rate for all depths: exact for such a chain, and the simplest
    distribution for a tree. Answers take many rounds, so that the mean decides.
    """
    from scipy.optimize import brentq  # scipy is needed for a simulation only

    if depth == 0 or mean <= 1.0:
        return (1.0,)

    def excess(rate: float) -> float:
        return sum(rate**level for level in range(depth + 1)) - mean

    rate = 1.0 if excess(1.0) <= 0 else float(brentq(excess, 0.0, 1.0, xtol=1e-14))
    reached = [rate**level for level in range(depth + 1)] + [0.0]
    return tuple(here - further for here, further in itertools.pairwise(reached))


def exact_steps(server: Server, points: Sequence[OperatingPoint]) -> StepTime:
    """The server's steps with the trees of `points`, computed exactly (slow)."""
    forward, speculation = server.forward, speculation_of(points, server.acceptance)

    @cache
    def decoding(batch: int, context: float) -> tuple[ForwardSeconds, Cycle]:
        """Verification and drafts, which do not depend on prompts in the step."""
        if not batch:
            return ForwardSeconds(), Cycle()
        point = points[speculation.level(batch)]
        cycle = server.cycle(point.shape, point.nodes, batch, context)
        shape, rows = (batch, context), cycle.nodes + 1
        return verification_s(forward, shape, rows, cycle.drafted_share), cycle

    @cache
    def products(tokens: int, beside: int) -> float:
        return forward.prompt(tokens, beside, 1).products if tokens else 0.0

    def seconds(batch: int, prompt_tokens: int, context: float, prompt_context: float) -> float:
        verify, cycle = decoding(batch, context)
        prompts_s = products(prompt_tokens, batch * (cycle.nodes + 1))
        prompts_s += forward.prompt_attention_s(prompt_tokens, prompt_context)
        work = step_work(forward, batch, verify, cycle, (prompts_s, float(prompt_tokens > 0)))
        return server.overheads.time_per_token_s(work, overlaps_host=server.rules.overlaps_host)

    return seconds


def step_grid(server: Server, points: Sequence[OperatingPoint], longest: int) -> StepGrid:
    """The server's steps, interpolated (quick); `longest` is the most tokens of a request.

    The first and last batch of every tree are on the grid, so no step is interpolated between two
    trees.
    """
    ends = {0} | {point.running for point in points}
    ends |= {later.running - 1 for later in points[1:]}
    step_tokens = server.rules.step_tokens
    prompts = [n for n in _PROMPT_TOKENS if n < step_tokens] + [step_tokens]
    contexts = sorted({max(round(share * longest), 1) for share in _CONTEXT_SHARES})
    return StepGrid(exact_steps(server, points), sorted(ends), prompts, contexts, longest)
