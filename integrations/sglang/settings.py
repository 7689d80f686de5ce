"""SGLang's settings from a plan: its command, and cost tables of DSPARK.

Names of options are those of SGLang 0.5.23 (speculative/adaptive_spec_params.py,
dspark_components/dspark_sps.py, ragged_verify.py). Its DSPARK verifies as many drafted tokens as
pay by a table of costs, of two schemas:

- steps: `sample_steps_per_sec` at `sample_batch_tokens` rows, each request with a whole draft, as
  SGLang's own profiler measures it; read as a staircase;
- sum: `bias_seconds` + alpha(requests) + theta(rows), both linear between probes. The sum is fitted
  to the server's steps in least squares of relative errors.
"""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from typing import Any

import numpy as np

from costmodel.acceptance import BLOCK_GAMMA
from costmodel.planning.exports import (
    Export,
    SettingsWriter,
    one_option_a_line,
    step_s,
    written_file,
)
from costmodel.planning.result import PlanOption
from costmodel.planning.servers import Server
from costmodel.planning.traffic import Traffic

VERSION = "SGLang 0.5.23"
_LEAST_BIAS_S = 1e-9


def _write(export: Export) -> list[str]:
    load, table = export.at_load, export.table
    options = _server_options(export, export.best)
    most = max(tokens for _, _, tokens in table)
    if not most:
        return [*one_option_a_line(options), f"# no --speculative-algorithm: {export.why_plain}"]
    kind = export.kind("SGLang", ("dflash", "eagle3"))
    drafter = f"--speculative-draft-model-path {export.checkpoint}"
    if kind == "eagle3":
        # One size from each batch on: among several, SGLang chooses by acceptance, not by cost.
        config = {str(first): {"candidate_steps": [tokens]} for first, _, tokens in table}
        options += [
            drafter,
            "--speculative-algorithm EAGLE3",
            f"--speculative-num-steps {most}",
            "--speculative-eagle-topk 1",
            f"--speculative-num-draft-tokens {most + 1}",
            "--speculative-adaptive",
            "--speculative-adaptive-config adaptive.json",
        ]
        return [*written_file("adaptive.json", json.dumps(config)), *one_option_a_line(options)]
    if not load.nodes:
        return [*one_option_a_line(options), f"# no --speculative-algorithm: {export.why_plain}"]
    options += [
        "--speculative-algorithm DFLASH",
        drafter,
        f"--speculative-num-draft-tokens {load.nodes + 1}",
    ]
    return [
        f"# one size for all batches, that of {load.running} requests at once",
        *one_option_a_line(options),
    ]


def _server_options(export: Export, best: PlanOption) -> list[str]:
    return [
        "python -m sglang.launch_server",
        f"--model-path {export.target}",
        f"--tp-size {best.tensor_parallel}",
        f"--max-running-requests {max(point.running for point in best.points)}",
        *export.precision_options,
    ]


def _write_dspark(export: Export, *, steps: bool) -> list[str]:
    """A table of costs, and the options that take it. The DSpark drafter is the user's."""
    best, server = export.plan.options[0], export.plan.options[0].server
    drafted = len(server.acceptance.chain) - 1 if server.acceptance else BLOCK_GAMMA
    make = steps_table if steps else sum_table
    most = max(point.running for point in best.points)
    table: StepTable = make(server, export.request.traffic, most_running=most, drafted=drafted)
    label = server.drafter.label if server.drafter else "none"
    start, *others = _server_options(export, best)
    options = [
        f"SGLANG_RAGGED_VERIFY_MODE=compact {start}",
        *others,
        "--speculative-algorithm DSPARK",
        "--speculative-draft-model-path PATH_OF_A_DSPARK_DRAFTER",
        "--speculative-dspark-sps-table-path dspark.json",
    ]
    return [
        f"# seconds of a step with up to {drafted} drafted tokens a request; drafts: {label}",
        *([f"# the sum is within {table.worst_error:.1%} of every step"] if not steps else []),
        "# only the mode compact verifies fewer rows: static verifies all, and cap-accept verifies",
        "# all and then accepts fewer",
        *written_file("dspark.json", json.dumps(table.values)),
        *one_option_a_line(options),
    ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepTable:
    """A table as the engine reads it, and the largest error of the sum that it is (0: none)."""

    values: dict[str, Any]
    worst_error: float = 0.0


def doubling(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    return sorted({most, *(2**power for power in range(most.bit_length()))})


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


# A draft length for each batch is taken with EAGLE-3 alone.
COMMAND = SettingsWriter(
    engine="sglang", version=VERSION, write=_write, by_batch=lambda kind: kind == "eagle3"
)
DSPARK = SettingsWriter(engine="sglang", version=VERSION, write=partial(_write_dspark, steps=False))
DSPARK_STEPS = SettingsWriter(
    engine="sglang", version=VERSION, write=partial(_write_dspark, steps=True)
)
