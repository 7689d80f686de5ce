"""Readers of SGLang's files (0.5.23): `bench_one_batch` results and DSpark cost tables.

`bench_one_batch --result-filename` writes a line for each (batch, input, output): the seconds of
the whole prompt's forward, and the median of the decoding steps.

`--speculative-dspark-sps-table-path` takes two schemas: steps per second by the rows of a step
(`sample_batch_tokens`, `sample_steps_per_sec`), or seconds as a sum, `bias_seconds` plus
alpha(requests) plus theta(rows), both linear between their probes. Neither says the context.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from costmodel.errors import InputError
from costmodel.imports.table import ImportedTable, ReadOptions, Record, ShapeTimes
from costmodel.io import MAX_TABLE_BYTES, read_bytes
from costmodel.strict_json import json_lines, read_json

_BATCH_HINT = "Give the file that `python -m sglang.bench_one_batch --result-filename FILE` writes"
_TABLE_HINT = "Give the file that --speculative-dspark-sps-table-path takes"
# Rows of one request in the points that are read off a sum.
_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 24, 32)


def read_one_batch(path: Path, options: ReadOptions) -> ImportedTable:
    """Prompts and plain steps. Raises InputError."""
    raw = read_bytes(path, InputError, most_bytes=MAX_TABLE_BYTES)
    times, names = ShapeTimes(path, hint=_BATCH_HINT), set()
    for number, value in json_lines(path, raw, hint=_BATCH_HINT):
        record = Record(value, f"{path}, line {number}", hint=_BATCH_HINT)
        batch, prompt = record.whole("batch_size", 1), record.whole("input_len", 1)
        steps = record.whole("output_len", 1) - 1
        times.add((prompt, 0, batch), record.positive("prefill_latency"))
        if steps:
            step_s = record.positive("median_decode_latency")
            times.add((1, prompt + steps // 2, batch), step_s)
        names.add(json.dumps(record.get("run_name")))
    points = times.points()
    return ImportedTable(
        points=points,
        tool="SGLang bench_one_batch",
        version=None,
        runtime="external",
        lacks=(
            f"steps of 2 to {int(np.min(points.rows[points.rows > 1])) - 1} rows",
            "the LM head of all rows of a prompt but the last",
            "sampling",
        ),
        left_out=times.left_out,
        model=f"run {', '.join(sorted(names))}",
    )


def read_dspark(path: Path, options: ReadOptions) -> ImportedTable:
    """A DSpark cost table of either schema. Raises InputError."""
    table = Record(read_json(path, hint=_TABLE_HINT), str(path), hint=_TABLE_HINT)
    if options.context is None:
        raise InputError(
            f"{path} does not say how many tokens were cached",
            hint="Give --context, the tokens of each request while it was profiled",
        )
    times = ShapeTimes(path, hint=_TABLE_HINT)
    added = "bias_seconds" in table.fields
    for rows, batch, seconds in _sums(table) if added else _steps(table):
        times.add((rows, options.context, batch), seconds)
    how = "a sum over requests and rows" if added else "by rows alone, counted as one sequence"
    return ImportedTable(
        points=times.points(),
        tool="SGLang DSpark table",
        version=None,
        runtime="external",
        lacks=(
            f"any context but {options.context} (as told)",
            "the draft, host time and acceptance apart: each step includes them",
        ),
        left_out=times.left_out,
        model=how,
    )


def _steps(table: Record) -> Iterator[tuple[int, int, float]]:
    rows, rates = table.wholes("sample_batch_tokens"), table.numbers("sample_steps_per_sec")
    _same_length(table, rows, rates, "sample_batch_tokens and sample_steps_per_sec")
    table.whole("max_batch_tokens", rows[-1])
    yield from ((count, 1, 1 / rate) for count, rate in zip(rows, rates, strict=True))


def _sums(table: Record) -> Iterator[tuple[int, int, float]]:
    """Seconds by (rows, batch) where both functions were probed."""
    bias_s = table.positive("bias_seconds")
    # The tool rounds tokens to multiples of 64, few ones to 0.
    requests, rows = table.wholes("bs_probes"), table.wholes("m_probes", 0)
    alpha_s, theta_s = _terms(table, "alpha_seconds"), _terms(table, "theta_seconds")
    _same_length(table, requests, alpha_s, "bs_probes and alpha_seconds")
    _same_length(table, rows, theta_s, "m_probes and theta_seconds")
    for batch, part_s in zip(requests, alpha_s, strict=True):
        for each in _ROWS:
            if rows[0] <= batch * each <= rows[-1]:
                yield each, batch, bias_s + part_s + float(np.interp(batch * each, rows, theta_s))


def _terms(table: Record, name: str) -> list[float]:
    """Terms of a sum, which may be 0 or below."""
    values = table.get(name)
    if not isinstance(values, list) or not all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in values
    ):
        raise InputError(f"{table.at} {name} must be a list of numbers", hint=_TABLE_HINT)
    return [float(value) for value in values]


def _same_length(table: Record, one: list[int], other: list[float], names: str) -> None:
    if len(one) != len(other):
        raise InputError(
            f"{table.at}: {names} have {len(one)} and {len(other)} numbers", hint=_TABLE_HINT
        )
