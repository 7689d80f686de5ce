"""Reader of NVIDIA's forward tables, `fpm_forward_perf.parquet` (AIConfigurator, AISimulate).

A row is one whole forward of an engine, of schema `aic_fpm_forward_perf`. `workload_kind` prefill:
`total_prefill_tokens` new tokens over all `batch_size` requests; decode: one for each. In both,
`total_kv_read_tokens` are the cached tokens of all requests together. Times are in milliseconds.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from costmodel.errors import InputError, shown
from costmodel.fields import MOST
from costmodel.imports.table import ImportedTable, ReadOptions, ShapeTimes, WeightFormat
from costmodel.io import MAX_TABLE_BYTES, read_bytes

_HINT = "Give a table of schema aic_fpm_forward_perf, fpm_forward_perf.parquet"
_TIMES = (
    "workload_kind", "batch_size", "total_prefill_tokens", "total_kv_read_tokens", "latency_ms",
)  # fmt: skip
_NAMES = ("model_path", "system", "backend", "backend_version", "tp")
# What else tells the settings of a table apart; older tables have fewer of these columns.
_SETTINGS = (
    "weight_quantization", "gemm_quant_mode", "moe_quant_mode", "fmha_quant_mode",
    "comm_quant_mode", "kv_cache_dtype", "parallel_strategy", "pp", "dp", "moe_tp", "moe_ep", "cp",
    "attention_backend", "moe_backend", "enable_wideep", "enable_eplb",
)  # fmt: skip
_WEIGHT_BYTES = {"fp8": 1.0, "fp8_static": 1.0, "fp8_block": 1.0, "int8_wo": 1.0, "int4_wo": 0.5,
                 "nvfp4": 0.5625}  # fmt: skip


def read_nvidia_forward(path: Path, options: ReadOptions) -> ImportedTable:
    """The forwards of one setting. Raises InputError."""
    rows = _selected(path, _rows(path), options)
    times = ShapeTimes(path, hint=_HINT)
    for row in rows:
        _add(times, row)
    first = rows[0]
    return ImportedTable(
        points=times.points(),
        tool="NVIDIA forward table",
        version=f"{first['backend']} {first['backend_version']}",
        runtime="external",
        lacks=("the LM head of all rows of a prompt but the last",),
        left_out=times.left_out,
        weights=_weights(first),
        processor=str(first["system"]),
        model=str(first["model_path"]),
    )


def _rows(path: Path) -> list[dict[str, Any]]:
    """The columns that are read, row by row. Raises InputError."""
    raw = read_bytes(path, InputError, most_bytes=MAX_TABLE_BYTES)
    if importlib.util.find_spec("pyarrow") is None:
        raise InputError("parquet files need pyarrow", hint="Install it: `pip install pyarrow`")
    arrow: Any = importlib.import_module("pyarrow")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    try:
        file = parquet.ParquetFile(io.BytesIO(raw))
        missing = [name for name in (*_TIMES, *_NAMES) if name not in file.schema_arrow.names]
        if missing:
            raise InputError(f"{path} has no column {', '.join(missing)}", hint=_HINT)
        names = [n for n in (*_TIMES, *_NAMES, *_SETTINGS) if n in file.schema_arrow.names]
        rows: list[dict[str, Any]] = file.read(columns=names).to_pylist()
    except (arrow.ArrowException, OSError, ValueError) as failure:
        reason = str(failure).splitlines()[0][:200]
        raise InputError(f"{path} cannot be read as parquet ({reason})", hint=_HINT) from None
    if not rows:
        raise InputError(f"{path} has no rows", hint=_HINT)
    return rows


def _selected(path: Path, rows: list[dict[str, Any]], options: ReadOptions) -> list[dict[str, Any]]:
    """The rows of one setting: those of `where` and the degree. Raises InputError."""
    where = {"tp": str(options.tensor_parallel), **options.where}
    for name, value in where.items():
        if name not in rows[0]:
            raise InputError(
                f"{path} has no column {name}", hint=f"It has {', '.join(sorted(rows[0]))}"
            )
        there = sorted({str(row[name]) for row in rows})
        rows = [row for row in rows if str(row[name]) == value]
        if not rows:
            option = "--tp" if name == "tp" else f"--where {name}=..."
            raise InputError(
                f"{path} has no forwards with {name} {value}",
                hint=f"Give {option}, one of {', '.join(there[:8])}",
            )
    for name in (*_NAMES, *_SETTINGS):
        there = sorted({str(row[name]) for row in rows}) if name in rows[0] else []
        if len(there) > 1:
            raise InputError(
                f"{path} holds several settings: {name} is {', '.join(there[:8])}",
                hint=f"Choose one, such as --where {name}={there[0]}",
            )
    return rows


def _add(times: ShapeTimes, row: Mapping[str, Any]) -> None:
    batch, new, cached = (_whole(times.path, row, name) for name in _TIMES[1:4])
    kind, latency = row["workload_kind"], row["latency_ms"]
    if not isinstance(latency, int | float) or not 0 < latency < 1e9 or not batch:
        raise InputError(
            f"{times.path}: latency_ms and batch_size must be above 0 (are {shown(latency)} and"
            f" {batch})",
            hint=_HINT,
        )
    if kind == "prefill" and new % batch:
        times.leave_out("of prompts of different lengths")
    elif kind in ("prefill", "decode"):
        rows = new // batch if kind == "prefill" else 1
        if not rows:
            raise InputError(f"{times.path}: a prefill has no new tokens", hint=_HINT)
        times.add((rows, round(cached / batch), batch), float(latency) * 1e-3)
    else:
        times.leave_out(f"of the kind {shown(kind)}")


def _whole(path: Path, row: Mapping[str, Any], name: str) -> int:
    value = row[name]
    if value is None and name == "total_prefill_tokens":  # of decoding
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST:
        raise InputError(f"{path}: {name} must be whole numbers (has {shown(value)})", hint=_HINT)
    return value


def _weights(row: Mapping[str, Any]) -> WeightFormat | None:
    name = row.get("weight_quantization") or row.get("gemm_quant_mode")
    if name is None:
        return None
    if name in ("bfloat16", "float16"):
        return WeightFormat(dtype=name)
    return WeightFormat(quantization=str(name), weight_bytes=_WEIGHT_BYTES.get(str(name)))
