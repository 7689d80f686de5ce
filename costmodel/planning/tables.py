"""Tables of a server's step costs and draft lengths, for engines that choose while they run.

SGLang's DSPARK verifies as many drafted tokens as pay by a table of costs, of two schemas:

- steps: `sample_steps_per_sec` at `sample_batch_tokens` rows, each request with a whole draft, as
  SGLang's own profiler measures it; read as a staircase;
- sum: `bias_seconds` + alpha(requests) + theta(rows), both linear between probes. The sum is fitted
  to the server's steps in least squares of relative errors.

A step is draft, verification, acceptance and the engine's work on the host, without prompts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from costmodel.planning.batching import Cycle, cycle_work
from costmodel.planning.servers import CONCURRENCIES, BatchChoice, Server
from costmodel.planning.traffic import Traffic

_LEAST_BIAS_S = 1e-9
# The first range of contexts ends here, and each other one at twice the end of the one before.
_SHORT, _LONG = 512, 131_072
# Batches up to which each one is tried: rows then fill the kernels' tiles one by one.
_EACH = 16
# A shorter draft within this share of the highest rate is taken instead.
_NO_DIFFERENCE = 0.01


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepTable:
    """A table as the engine reads it, and the largest error of the sum that it is (0: none)."""

    values: dict[str, Any]
    worst_error: float = 0.0


def steps_table(server: Server, traffic: Traffic, *, most_running: int, drafted: int) -> StepTable:
    """Steps per second by rows, with `drafted` tokens for each of 1 to `most_running` requests.

    Below the rows of one whole draft, one request verifies a part of it: without these points
    SGLang reads the whole draft's rate there, and never shortens a single request's.
    """
    shapes = [(1, rows) for rows in doubling(drafted + 1)[:-1]]
    shapes += [(batch, drafted + 1) for batch in doubling(most_running)]
    rates = [1 / step_s(server, traffic, batch, rows) for batch, rows in shapes]
    return StepTable(
        values={
            "sample_batch_tokens": [batch * rows for batch, rows in shapes],
            "sample_steps_per_sec": [float(f"{rate:.6g}") for rate in rates],
            "max_batch_tokens": most_running * (drafted + 1),
        }
    )


def sum_table(server: Server, traffic: Traffic, *, most_running: int, drafted: int) -> StepTable:
    """The sum over requests and rows that fits the server's steps best."""
    batches, widths = doubling(most_running), doubling(drafted + 1)
    shapes = [(batch, rows) for batch in batches for rows in widths]
    seconds = np.array([step_s(server, traffic, batch, rows) for batch, rows in shapes])
    probes = sorted({batch * rows for batch, rows in shapes})
    # For each shape a 1 in the column of its requests and in that of its rows.
    parts = np.zeros((len(shapes), len(batches) + len(probes)))
    for row, (batch, rows) in enumerate(shapes):
        parts[row, batches.index(batch)] = 1.0
        parts[row, len(batches) + probes.index(batch * rows)] = 1.0
    solved = np.linalg.lstsq(parts / seconds[:, None], np.ones(len(seconds)), rcond=None)[0]
    alpha_s, theta_s = solved[: len(batches)], solved[len(batches) :]
    # The common part is the step of one row, so that both terms begin at 0.
    bias_s = max(float(alpha_s[0] + theta_s[0]), _LEAST_BIAS_S)
    worst = float(np.max(np.abs(parts @ solved / seconds - 1)))
    return StepTable(
        values={
            "bias_seconds": float(f"{bias_s:.6g}"),
            "bs_probes": batches,
            "alpha_seconds": [float(f"{value:.6g}") for value in alpha_s - alpha_s[0]],
            "m_probes": probes,
            "theta_seconds": [float(f"{value:.6g}") for value in theta_s - theta_s[0]],
        },
        worst_error=worst,
    )


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


def context_table(server: Server, lengths: Sequence[int], *, most_running: int) -> list[list[int]]:
    """Rows of [first batch, last batch, first context, last context, drafted tokens].

    The ranges cover every batch to `most_running` and every context once; where the cache does not
    hold so many, the length of the longest context that it holds is repeated.
    lengths  draft lengths that may be chosen
    """
    tried = {*range(1, _EACH + 1), *CONCURRENCIES, most_running}
    batches = sorted(batch for batch in tried if batch <= most_running)
    room = server.cache_tokens()
    longest = max(min(room, _LONG), _SHORT)
    ends = [_SHORT * 2**power for power in range(int(np.log2(longest / _SHORT)) + 1)]
    firsts = [0, *(end + 1 for end in ends[:-1])]
    sizes = []
    for running in batches:
        middles = [0.75 * end for end in ends if 0.75 * end * running <= room] or [_SHORT]
        row = [_best_length(server, lengths, running, middle) for middle in middles]
        sizes.append(row + row[-1:] * (len(ends) - len(row)))
    return [
        [*batch, *context, tokens]
        for batch, row in joined(batches, most_running, sizes)
        for context, tokens in joined(firsts, ends[-1], row)
    ]


def _best_length(server: Server, lengths: Sequence[int], running: int, context: float) -> int:
    """The shortest draft within 1 % of the most tokens a second, without prompts."""
    traffic = Traffic(prompt_tokens=context, output_tokens=1)
    acceptance = server.acceptance
    rates = {0: 1 / step_s(server, traffic, running, 1, drafts=False)}
    for tokens in lengths:
        if acceptance is None or not 0 < tokens < len(acceptance.chain):
            continue
        if running * (tokens + 1) <= server.most_rows:
            seconds = step_s(server, traffic, running, tokens + 1)
            rates[tokens] = acceptance.committed("chain", tokens) / seconds
    most = max(rates.values())
    return min(tokens for tokens, rate in rates.items() if rate >= most * (1 - _NO_DIFFERENCE))


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
    error = max(error, _NO_DIFFERENCE)
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
                beyond = round(max(loss - _NO_DIFFERENCE, 0.0), 6)
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
