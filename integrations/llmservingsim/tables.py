"""Operator tables in a folder, in the formats of LLMServingSim's profilers.

A folder is named `<device>_<target>_tp<n>` and holds one of two formats:
- `dense.csv` (layer, tokens, time_us), `per_sequence.csv` (layer, sequences, time_us) and
  `attention.csv` (prefill_chunk, kv_prefill, n_decode, kv_decode, time_us): fused kernels;
- `layers.csv` (layer_name, input, latency(ns)) and `attention.csv` (time_stats...): single
  operators. The cached length of a chunk includes the chunk: 32 rows at a length of 1024 take as
  long as one row, and 256 rows at 256 as long as 256 rows with an empty cache.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from costmodel.architecture import ModelArchitecture
from costmodel.catalog import DeviceSpec, find_device, find_target
from costmodel.compose.attention import Attention, TileForm
from costmodel.compose.matmul import MatmulTable
from costmodel.compose.tables import OperatorTables, SmallKind
from costmodel.errors import InputError, shown
from costmodel.io import read_table
from costmodel.statistics import Array

# Numbers in a table, whose times may be in milliseconds or nanoseconds.
SMALLEST, LARGEST = 1e-9, 1e15
Curves = dict[str, tuple[Array, Array]]
Chunks = list[tuple[int, int, float]]  # rows, cached tokens, seconds
Steps = dict[tuple[int, int], float]  # (batch, cached tokens) -> seconds

_PRODUCTS = {
    "qkv_proj": "qkv",
    "q_proj": "query",
    "k_proj": "kv",
    "v_proj": "kv",
    "o_proj": "output",
    "gate_up_proj": "gate_up",
    "gate_proj": "gate",
    "up_proj": "gate",
    "down_proj": "down",
    "lm_head": "head",
}
_SMALL: dict[SmallKind, tuple[str, ...]] = {
    "embedding": ("embedding",),
    "norm": ("layernorm", "input_layernorm"),
    "rotary": ("rotary_emb", "rope"),
    "activation": ("act_fn",),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredSmall:
    """Small operators measured over row counts at one width; equal bytes take equal time."""

    tables: Mapping[SmallKind, tuple[Array, Array]]
    widths: Mapping[SmallKind, int]

    def seconds(self, kind: SmallKind, rows: Array, width: int) -> Array:
        """Interpolation over rows x width [rows]; proportional beyond the last point."""
        grid, seconds = self.tables[kind]
        place = rows * (width / self.widths[kind])
        inside = np.interp(place, grid, seconds)
        return np.asarray(inside * np.maximum(place / grid[-1], 1.0), dtype=np.float64)


def folder_subject(folder: Path) -> tuple[DeviceSpec, ModelArchitecture, int]:
    """Device, target and tensor-parallel degree from a folder's name. Raises InputError."""
    if not folder.is_dir():
        raise InputError(
            f"{folder} is not a folder of operator tables", hint="Or name vllm, sglang or trtllm"
        )
    match = re.fullmatch(r"(.+?)_(.+)_tp(\d+)", folder.resolve().name)
    if match is None:
        raise InputError(
            f"the folder name '{folder.name}' does not say what was measured",
            hint="Name it <device>_<target>_tp<n>, such as rtx-a6000_llama-3.1-8b_tp1",
        )
    return find_device(match[1]), find_target(match[2]).architecture, int(match[3])


def load_folder(folder: Path, source: str = "") -> OperatorTables:
    """The bfloat16 operator tables in a folder. Raises InputError with the file that is wrong."""
    device, measured, tp = folder_subject(folder)
    fused, path = (folder / "dense.csv").is_file(), folder / "attention.csv"
    if fused:
        curves = _curves(folder / "dense.csv", "layer", "tokens", ("time_us", 1e-6))
        curves |= _curves(folder / "per_sequence.csv", "layer", "sequences", ("time_us", 1e-6))
        chunks, steps = _fused_attention(path)
    else:
        curves = _curves(folder / "layers.csv", "layer_name", "input", ("latency(ns)", 1e-9))
        chunks, steps = _single_attention(path)
    if not chunks or not any(batch == 1 for batch, _ in steps):
        raise InputError(f"{path} has no chunks of new rows, or no single rows, of one sequence")
    return OperatorTables(
        device=device,
        engine="vllm" if fused else "transformers",
        source=source or f"operator tables {folder.resolve().name}",
        matmul=_matmul(curves, device, measured, tp),
        attention=_attention(chunks, steps, device, measured, tp),
        small=_small(curves, measured, tp),
        head_dim=measured.head_dim,
        fused=fused,
        tensor_parallel=tp,
    )


def _matmul(curves: Curves, device: DeviceSpec, a: ModelArchitecture, tp: int) -> MatmulTable:
    query, key, ffn = a.query_width // tp, a.kv_width // tp, a.ffn // tp
    sizes = {
        "qkv": (query + 2 * key, a.hidden),
        "query": (query, a.hidden),
        "kv": (key, a.hidden),
        "output": (a.hidden, query),
        "gate_up": (2 * ffn, a.hidden),
        "gate": (ffn, a.hidden),
        "down": (a.hidden, ffn),
        "head": (a.vocab // tp, a.hidden),
    }
    # Two products of one shape (key and value) share the first one's times.
    shapes: dict[tuple[int, int], tuple[Array, Array]] = {}
    for layer, product in _PRODUCTS.items():
        if layer in curves:
            shapes.setdefault(sizes[product], curves[layer])
    return MatmulTable(shapes=shapes, peaks=device.peaks, l2_bytes=device.l2_bytes)


def _small(curves: Curves, a: ModelArchitecture, tp: int) -> MeasuredSmall:
    widths: dict[SmallKind, int] = {
        "embedding": a.hidden,
        "norm": a.hidden,
        "rotary": (a.query_width + a.kv_width) // tp,
        "activation": a.ffn // tp,
    }
    tables: dict[SmallKind, tuple[Array, Array]] = {}
    for kind, names in _SMALL.items():
        name = next((name for name in names if name in curves), None)
        if name is None:
            raise InputError(f"the operator tables have no {names[0]}")
        tables[kind] = curves[name]
    return MeasuredSmall(tables=tables, widths=widths)


def _attention(
    chunks: Chunks, steps: Steps, device: DeviceSpec, a: ModelArchitecture, tp: int
) -> Attention:
    rows, cached, seconds = np.array(chunks, dtype=np.float64).T
    # Batches that read keys and values faster than memory allows were timed over one shared cache
    # (RTX A6000: up to 12 TB/s of 0.768).
    wrong = set()
    for (batch, length), step_s in steps.items():
        cache_bytes = 4 * batch * length * (a.kv_width // tp)
        if cache_bytes > max(device.l2_bytes, device.peak_bytes_per_s * step_s) and batch > 1:
            wrong.add(batch)
    steps = {place: step_s for place, step_s in steps.items() if place[0] not in wrong}
    heads, kv_heads = a.heads // tp, a.kv_heads // tp
    tile_rows, key_s, _ = fit_tile_rows(
        rows, cached, seconds, heads=heads, sm_count=device.sm_count
    )
    form = TileForm(tile_rows=tile_rows)
    waves = np.ceil(form.tiles(rows, heads, kv_heads) / device.sm_count)
    context: dict[tuple[int, int], float] = {}
    for count in np.unique(rows):
        here = rows == count
        level = float(np.median((seconds - key_s * waves * cached)[here]))
        exact = seconds[here & (cached == 0)]
        context[1, int(count)] = float(exact[0]) if len(exact) else max(level, 1e-6)
    first = min(value for (batch, _), value in steps.items() if batch == 1)
    context[1, 1] = min(first, min(context.values()))
    return Attention(
        generation={(heads, kv_heads): steps},
        context={(heads, kv_heads): context},
        form=form,
        sm_count=device.sm_count,
        key_s=key_s,
        busy_key_s=key_s,
    )


def _fused_attention(path: Path) -> tuple[Chunks, Steps]:
    chunks: Chunks = []
    steps: Steps = {}
    columns = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
    for _, (rows, cached, batch, length, microseconds) in _lines(path, columns):
        if not microseconds > 0:
            raise InputError(f"{path} has a time that is empty or 0")
        if batch == 0 and rows > 0:
            chunks.append((int(rows), int(cached), microseconds * 1e-6))
        elif rows == 0 and batch > 0:
            steps[int(batch), int(length)] = microseconds * 1e-6
    return chunks, steps


def _single_attention(path: Path) -> tuple[Chunks, Steps]:
    medians = ("time_stats.attn_prefill.median", "time_stats.attn_decode.median")
    chunks: Chunks = []
    steps: Steps = {}
    columns = ("batch_size", "prefill_chunk_size", "kv_cache_size", *medians)
    for _, (batch, rows, length, chunk_ms, step_ms) in _lines(path, columns):
        if rows > 0 and np.isfinite(chunk_ms) and length >= rows:
            chunks.append((int(rows), int(length - rows), chunk_ms * 1e-3))
        elif rows == 0 and np.isfinite(step_ms):
            steps[int(batch), int(length)] = step_ms * 1e-3
    return chunks, steps


def _curves(path: Path, layer: str, axis: str, time: tuple[str, float]) -> Curves:
    """(axis values ascending, seconds) by layer; `time` is a column and its unit in seconds."""
    column, unit_s = time
    curves: dict[str, dict[float, float]] = {}
    for name, (place, value) in _lines(path, (axis, column), label=layer):
        if not (place > 0 and value > 0):
            raise InputError(f"{path}: {shown(name)} has an empty cell, or a 0")
        curves.setdefault(name, {})[place] = value * unit_s
    return {
        name: (np.array(sorted(curve)), np.array([curve[x] for x in sorted(curve)]))
        for name, curve in curves.items()
    }


def _lines(
    path: Path, columns: tuple[str, ...], label: str | None = None
) -> list[tuple[str, list[float]]]:
    """The text of the column `label` and the numbers of `columns` of each line of a CSV file.

    An empty number is NaN, where the column's name says that it is a time; no other is negative
    or infinite. Raises InputError.
    """
    if not path.exists():
        raise InputError(f"{path.parent} has no {path.name}")
    try:
        return [
            (
                line[label] if label else "",
                [_number(line[name], empty="time" in name) for name in columns],
            )
            for _, line in read_table(path, columns if label is None else (label, *columns))[1]
        ]
    except (TypeError, ValueError) as failure:
        raise InputError(f"{path} holds something that is not a number ({failure})") from None


def _number(text: str, empty: bool) -> float:
    if not text:
        if empty:
            return math.nan
        raise ValueError("a cell is empty")
    number = float(text)
    if number != 0 and not SMALLEST <= number < LARGEST:
        raise ValueError(f"{text[:40]!r} is negative or beyond all measure")
    return number


def fit_tile_rows(
    rows: ArrayLike,
    cached: ArrayLike,
    seconds: ArrayLike,
    *,
    heads: int,
    sm_count: int,
    candidates: Sequence[int] = (32, 64, 128, 256),
) -> tuple[int, float, float]:
    """The tile height that fits chunked attention best: (M, key_s, mean relative error).

    `rows` new tokens over `cached` ones took `seconds`; arrays [points]. One key_s is fitted for
    all row counts, and one time without a cache for each. Raises InputError for fewer than two row
    counts measured at two cached lengths each.
    """
    s, c, t = (np.asarray(x, dtype=np.float64) for x in (rows, cached, seconds))
    counts = [n for n in np.unique(s) if len(np.unique(c[s == n])) > 1]
    if len(counts) < 2:
        raise InputError("chunked attention needs two row counts at two cached lengths each")
    fits = []
    for height in candidates:
        form = TileForm(tile_rows=height)
        waves = np.ceil(form.tiles(s, heads, heads) / sm_count)
        x = waves * c
        # The common slope of a relative least-squares fit with one level per row count.
        top, bottom, errors = 0.0, 0.0, []
        for here in (s == n for n in counts):
            weight = 1 / t[here] ** 2
            dx = x[here] - np.average(x[here], weights=weight)
            dt = t[here] - np.average(t[here], weights=weight)
            top += float(np.sum(weight * dx * dt))
            bottom += float(np.sum(weight * dx * dx))
        key_s = top / bottom
        for here in (s == n for n in counts):
            level = np.median(t[here] - key_s * x[here])
            errors.append(np.abs(level + key_s * x[here] - t[here]) / t[here])
        fits.append((float(np.mean(np.concatenate(errors))), int(height), key_s))
    error, height, key_s = min(fits)
    return height, key_s, error
