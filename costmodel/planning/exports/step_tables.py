"""SGLang's DSpark cost tables from a server: seconds of a step by requests and rows.

DSpark verifies as many drafted tokens as pay by this table. Two schemas (SGLang 0.5.23,
speculative/dspark_components/dspark_sps.py):

- steps: `sample_steps_per_sec` at `sample_batch_tokens` rows, each request with a whole draft, as
  SGLang's own profiler measures it; read as a staircase;
- sum: `bias_seconds` + alpha(requests) + theta(rows), both linear between probes. The sum is fitted
  to the server's steps in least squares of relative errors.

A step is draft, verification, acceptance and the engine's work on the host, without prompts.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodel.planning.batching import Cycle, cycle_work
from costmodel.planning.servers import Server
from costmodel.planning.traffic import Traffic

Array = NDArray[np.float64]

_LEAST_BIAS_S = 1e-9


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepTable:
    """A table as the engine reads it, and the largest error of the sum that it is (0: none)."""

    values: dict[str, Any]
    worst_error: float = 0.0


def steps_table(server: Server, traffic: Traffic, *, most_running: int, drafted: int) -> StepTable:
    """Steps per second by rows, with `drafted` tokens for each of 1 to `most_running` requests."""
    batches = doubling(most_running)
    rates = [1 / step_s(server, traffic, batch, drafted + 1) for batch in batches]
    rows = [batch * (drafted + 1) for batch in batches]
    return StepTable(
        values={
            "sample_batch_tokens": rows,
            "sample_steps_per_sec": [float(f"{rate:.6g}") for rate in rates],
            "max_batch_tokens": rows[-1],
        }
    )


def sum_table(server: Server, traffic: Traffic, *, most_running: int, drafted: int) -> StepTable:
    """The sum over requests and rows that fits the server's steps best."""
    batches, widths = doubling(most_running), doubling(drafted + 1)
    shapes = [(batch, rows) for batch in batches for rows in widths]
    seconds = np.array([step_s(server, traffic, batch, rows) for batch, rows in shapes])
    probes = sorted({batch * rows for batch, rows in shapes})
    parts = _indicators(shapes, batches, probes)
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


def step_s(server: Server, traffic: Traffic, running: int, rows: int) -> float:
    """Seconds of one step of `running` requests with `rows` rows each, without prompts.

    The draft is made in every step: DSpark decides after it how much to verify.
    """
    cycle, drafter = Cycle(), server.drafter
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


def doubling(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    return sorted({most, *(2**power for power in range(most.bit_length()))})


def _indicators(shapes: list[tuple[int, int]], batches: list[int], probes: list[int]) -> Array:
    """For each shape a 1 in the column of its requests and in that of its rows."""
    parts = np.zeros((len(shapes), len(batches) + len(probes)))
    for row, (batch, rows) in enumerate(shapes):
        parts[row, batches.index(batch)] = 1.0
        parts[row, len(batches) + probes.index(batch * rows)] = 1.0
    return parts
