"""Reader of `vllm bench forward --output-json` (vLLM 0.33, vllm/lab/studies/forward).

A list of cases. Each names its requests by `query_len` (new tokens), `kv_len` (cached tokens with
the new ones) and `num_draft_tokens`, and gives the median of captured forwards in microseconds.
"""

from __future__ import annotations

from pathlib import Path

from costmodel.errors import InputError
from costmodel.imports.table import ImportedTable, ReadOptions, Record, ShapeTimes
from costmodel.strict_json import read_json

_HINT = "Give the file that `vllm bench forward --output-json FILE` writes"


def read_vllm_forward(path: Path, options: ReadOptions) -> ImportedTable:
    """The cases whose requests all have one query length. Raises InputError."""
    data = read_json(path, hint=_HINT)
    if not isinstance(data, list) or not data:
        raise InputError(f"{path} holds no list of cases", hint=_HINT)
    times = ShapeTimes(path, hint=_HINT)
    for index, value in enumerate(data):
        _add_case(times, Record(value, f"{path}, case {index + 1}", hint=_HINT), options)
    return ImportedTable(
        points=times.points(),
        tool="vLLM bench forward",
        version=None,
        runtime="kernels",
        lacks=("host time", "the LM head", "sampling"),
        left_out=times.left_out,
    )


def _add_case(times: ShapeTimes, case: Record, options: ReadOptions) -> None:
    ranks = case.records("ranks")
    if len(ranks) != options.tensor_parallel:
        raise InputError(
            f"{case.at} was run by {len(ranks)} ranks, but --tp is {options.tensor_parallel}",
            hint="Give their number as --tp; data-parallel and pipelined runs are not read",
        )
    if "drafter" in ranks[0].fields:
        times.leave_out("timed with its drafter; `--exclude-drafter` times the target alone")
        return
    requests = case.records("requests")
    rows = {request.whole("query_len", 1) for request in requests}
    if len(rows) != 1:
        times.leave_out("of requests with different query lengths")
        return
    context = [request.whole("kv_len", 1) - request.whole("query_len", 1) for request in requests]
    if min(context) < 0:
        raise InputError(f"{case.at} has a kv_len below its query_len", hint=_HINT)
    latency = Record(ranks[0].get("latency_us"), f"{case.at}, latency_us", hint=_HINT)
    samples = latency.numbers("samples_us") if "samples_us" in latency.fields else []
    times.add(
        (rows.pop(), round(sum(context) / len(context)), len(requests)),
        case.positive("median_us") * 1e-6,
        samples_s=[sample * 1e-6 for sample in samples],
    )
