"""A server's step times and draft lengths, for tables of engines that choose while they run.

A step is draft, verification, acceptance and the engine's work on the host, without prompts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from costmodel.planning.batching import Cycle, cycle_work
from costmodel.planning.servers import BatchChoice, Server
from costmodel.planning.traffic import Traffic

NO_DIFFERENCE = 0.01  # a shorter draft within this share of the highest rate is taken instead


def step_s(
    server: Server, traffic: Traffic, running: int, rows: int, *, drafts: bool = True
) -> float:
    """Seconds of one step of `running` requests with `rows` rows each, without prompts.

    drafts  whether the step makes a draft: DSpark decides after it how much to verify
    """
    cycle, drafter = Cycle(), server.drafter if drafts else None
    if drafter is not None:
        context = traffic.prompt_tokens + traffic.output_tokens / 2
        cycle = Cycle(
            draft=drafter.draft_s(server.forward, running, context, rows - 1),
            draft_layers=drafter.layers,
            draft_host_s=running * drafter.host_s,
        )
    cycle = dataclasses.replace(
        cycle, nodes=rows - 1, tree_host_s=running * server.tree_s("chain", rows - 1)
    )
    work = cycle_work(server.forward, server.rules, traffic, running, cycle)
    work = dataclasses.replace(work, prompts_s=0.0, prompt_steps=0.0)
    return server.overheads.time_per_token_s(work, overlaps_host=server.rules.overlaps_host)


def steady_lengths(choices: Sequence[BatchChoice], error: float) -> tuple[list[int], list[float]]:
    """A draft length for each choice that falls with the requests at once, and its loss.

    A loss is the time per token over that of the best length, less 1. Of all falling schedules
    whose losses are inside `error`, or inside the least error that one keeps to, that of the fewest
    steps, then of the smallest losses beyond 1 % and the shortest lengths. None is slower than
    plain steps.
    """
    losses = []
    for choice in choices:
        least_s, plain_s = min(choice.chains_s.values()), choice.chains_s[0]
        losses.append({n: s / least_s - 1 for n, s in choice.chains_s.items() if s <= plain_s})
    error = max(error, NO_DIFFERENCE)
    while (lengths := _falling(losses, error)) is None:
        error *= 1.1
    return lengths, [of[length] for of, length in zip(losses, lengths, strict=True)]


def _falling(losses: Sequence[Mapping[int, float]], error: float) -> list[int] | None:
    """The best schedule inside the error by dynamic programming; None where there is none."""
    ends: dict[int, tuple[int, float, list[int]]] = {}  # by last length: steps, losses, lengths
    for count, of in enumerate(losses):
        longer = {}
        for length, loss in of.items():
            before = [
                (steps + (last != length), total, path)
                for last, (steps, total, path) in ends.items()
                if last >= length
            ]
            before = before if count else [(0, 0.0, [])]
            if loss <= error and before:
                steps, total, path = min(before)
                beyond = round(max(loss - NO_DIFFERENCE, 0.0), 6)
                longer[length] = steps, total + beyond, [*path, length]
        ends = longer
    return min(ends.values())[2] if ends else None


def joined(
    firsts: Sequence[int], last: int, values: Sequence[Any]
) -> Iterator[tuple[tuple[int, int], Any]]:
    """Ranges (first, last) with their value; neighbours of equal value are one.

    A value holds from its first number to the one before the next first number.
    """
    starts = [i for i, value in enumerate(values) if i == 0 or value != values[i - 1]]
    for start, after in zip(starts, [*starts[1:], None], strict=True):
        end = last if after is None else firsts[after] - 1
        yield (firsts[start], end), values[start]


def doubling(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    return sorted({most, *(2**power for power in range(most.bit_length()))})
