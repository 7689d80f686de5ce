"""Forward times in SGLang's DSpark tables (0.5.23, --speculative-dspark-sps-table-path).

A table has steps per second by the rows of a step (`sample_batch_tokens`, `sample_steps_per_sec`),
or seconds as a sum, `bias_seconds` plus alpha(requests) plus theta(rows), both linear between their
probes. Neither says the context.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from costmodel.errors import InputError
from costmodel.imports import ImportedTable, ShapeTimes, TableRecord
from costmodel.io import read_json

_DSPARK_HINT = "Give the file that --speculative-dspark-sps-table-path takes"
# Rows of one request in the points that are read off a sum.
_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 24, 32)


def read_dspark(path: Path, context: int | None = None) -> ImportedTable:
    """A table of either schema, measured over `context` cached tokens. Raises InputError."""
    table = TableRecord(read_json(path, hint=_DSPARK_HINT), str(path), hint=_DSPARK_HINT)
    if context is None:
        raise InputError(
            f"{path} does not say how many tokens were cached",
            hint="Give --context, the tokens of each request while it was profiled",
        )
    times = ShapeTimes(path, hint=_DSPARK_HINT)
    added = "bias_seconds" in table.fields
    for rows, batch, seconds in _sums(table) if added else _steps(table):
        times.add((rows, context, batch), seconds)
    how = "a sum over requests and rows" if added else "by rows alone, counted as one sequence"
    return ImportedTable(
        points=times.points(),
        tool="SGLang DSpark table",
        version=None,
        runtime="external",
        lacks=(
            f"any context but {context} (as told)",
            "the draft, host time and acceptance apart: each step includes them",
        ),
        left_out=times.left_out,
        model=how,
    )


def _steps(table: TableRecord) -> Iterator[tuple[int, int, float]]:
    rows, rates = table.wholes("sample_batch_tokens"), table.numbers("sample_steps_per_sec")
    _same_length(table, rows, rates, "sample_batch_tokens and sample_steps_per_sec")
    table.whole("max_batch_tokens", rows[-1])
    yield from ((count, 1, 1 / rate) for count, rate in zip(rows, rates, strict=True))


def _sums(table: TableRecord) -> Iterator[tuple[int, int, float]]:
    """Seconds by (rows, batch) where both functions were probed."""
    bias_s = table.positive("bias_seconds")
    # The tool rounds tokens to multiples of 64, few ones to 0.
    requests, rows = table.wholes("bs_probes"), table.wholes("m_probes", 0)
    alpha_s, theta_s = table.terms("alpha_seconds"), table.terms("theta_seconds")
    _same_length(table, requests, alpha_s, "bs_probes and alpha_seconds")
    _same_length(table, rows, theta_s, "m_probes and theta_seconds")
    for batch, part_s in zip(requests, alpha_s, strict=True):
        for each in _ROWS:
            if rows[0] <= batch * each <= rows[-1]:
                yield each, batch, bias_s + part_s + float(np.interp(batch * each, rows, theta_s))


def _same_length(table: TableRecord, one: list[int], other: list[float], names: str) -> None:
    if len(one) != len(other):
        raise InputError(
            f"{table.at}: {names} have {len(one)} and {len(other)} numbers", hint=_DSPARK_HINT
        )
