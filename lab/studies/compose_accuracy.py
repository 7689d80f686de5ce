"""Composed against measured: RTX PRO 6000 Blackwell Server, Llama-3.1-8B, and the tile form.

    python -m lab.studies.compose_accuracy [--shared ../shared]

Forwards composed from aiconfigurator-core against forwards summed from the operator profiles of
casys-kaist/LLMServingSim (MIT). Nothing in the composition was fitted on that GPU's chunked
attention: the form of attention over cached tokens comes from the RTX 4090 and the RTX A6000.
The form of verifications, which split their keys, is compared with measured single rows of as many
query heads.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.calibration.points import ErrorSummary
from costmodel.catalog import find_device, find_target
from costmodel.compose.aiconfigurator import ENGINES, SYSTEMS, load_published
from costmodel.compose.attention import fit_tile_rows
from costmodel.compose.operators import ComposedForward
from lab.studies.common import environment, store

TARGET = find_target("meta-llama/Llama-3.1-8B-Instruct").architecture
MAX_ROWS, MAX_CONTEXT = 256, 4096


def read_set(path: Path) -> dict[str, np.ndarray]:
    """Columns of a set of measured forwards; NaN where empty. Microseconds."""
    with path.open(encoding="utf-8", newline="") as stream:
        lines = list(csv.DictReader(stream))
    return {
        name: np.array([float(line[name]) if line[name] else np.nan for line in lines])
        for name in lines[0]
    }


def error_of(forward: ComposedForward, measured: dict[str, np.ndarray]) -> dict[str, Any]:
    """Errors of the whole forward and of its parts, 1..256 rows on at most 4096 tokens."""
    here = (measured["new_tokens"] <= MAX_ROWS) & (measured["context_tokens"] <= MAX_CONTEXT)
    here &= np.isfinite(measured["forward_us"])
    rows, context = measured["new_tokens"][here], measured["context_tokens"][here]
    parts = {
        "forward": [forward.seconds([s], [c])[0, 0] for s, c in zip(rows, context, strict=True)],
        "linear": forward.linear_s(rows),
        "lm_head": forward.lm_head_s(rows),
        "attention": [
            forward.attention_s(int(s), np.array([c]))[0]
            for s, c in zip(rows, context, strict=True)
        ],
    }
    result: dict[str, Any] = {}
    for name, seconds in parts.items():
        true_s = measured[f"{name}_us"][here] * 1e-6
        error = ErrorSummary.of(seconds, true_s)
        result[name] = {
            "points": error.points, "mape": error.mape, "p95": error.p95, "worst": error.worst,
            "bias": float(np.mean(np.asarray(seconds) / true_s - 1)),
        }  # fmt: skip
    return result


def two_devices(shared: Path) -> dict[str, Any]:
    """The same on two devices; the measured forwards leave communication out, so do these."""
    tables = load_published(find_device("rtx-pro-6000-server"))
    forward = ComposedForward(
        architecture=TARGET, tables=dataclasses.replace(tables, all_reduce={}), tensor_parallel=2
    )
    path = shared / "forward_latency" / "rtxpro6000-server_llama-3.1-8b_tp2.csv"
    return error_of(forward, read_set(path))


def tile_forms(shared: Path) -> dict[str, Any]:
    """Rows a tile, seconds a key and the error of the form on three devices' chunks."""
    forms: dict[str, Any] = {}
    for label, device in (
        ("rtx4090", "rtx-4090"),
        ("rtxpro6000-server", "rtx-pro-6000-server"),
        ("rtx-a6000", "rtx-a6000"),
    ):
        chunks = read_set(shared / "forward_latency" / f"{label}_llama-3.1-8b_tp1.csv")
        rows, context = chunks["new_tokens"], chunks["context_tokens"]
        if label == "rtx-a6000":  # its cached length counts the chunk
            context = context - rows
        many = rows > 1
        seconds = chunks["attention_us"][many] * 1e-6 / TARGET.layers
        units = find_device(device).sm_count
        forms[device] = fit_tile_rows(
            rows[many], context[many], seconds, heads=TARGET.heads, sm_count=units
        )
    return {
        device: {"tile_rows": rows, "key_s": key_s, "mape": error}
        for device, (rows, key_s, error) in forms.items()
    }


def split_form() -> dict[str, Any]:
    """Rows of a verification against measured query heads, by device and engine.

    s rows of 4 query heads a key-value head are the work of one row with 4 s of them, which the
    generation tables hold up to 64 or 128 a key-value head. Of one sequence and of more at once.
    """
    result: dict[str, Any] = {}
    for slug, engine in itertools.product(SYSTEMS, ENGINES[:2]):
        split = load_published(find_device(slug), engine).attention.splitting_keys()
        taken: dict[str, list[float]] = {"one": [], "more": []}
        measured: dict[str, list[float]] = {"one": [], "more": []}
        for (heads, kv_heads), table in split.generation.items():
            rows, rest = divmod(heads, 4 * kv_heads)
            if rest or rows < 2 or (4 * kv_heads, kv_heads) not in split.generation:
                continue
            for (batch, tokens), seconds in table.items():
                if tokens >= 1000:
                    sequences = "one" if batch == 1 else "more"
                    one = split.seconds(rows, [tokens], batch, 4 * kv_heads, kv_heads)
                    taken[sequences].append(float(one[0]))
                    measured[sequences].append(seconds)
        result[f"{slug}, {engine}"] = {
            sequences: _summary(np.array(taken[sequences]), np.array(measured[sequences]))
            for sequences in taken
        }
    return result


def _summary(taken: np.ndarray, measured: np.ndarray) -> dict[str, Any]:
    error = ErrorSummary.of(taken, measured)
    bias = float(np.mean(taken / measured - 1))
    return {"points": error.points, "mape": error.mape, "worst": error.worst, "bias": bias}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shared", type=Path, default=Path(__file__).parents[3] / "shared")
    shared = parser.parse_args().shared / "data"
    measured = read_set(shared / "forward_latency" / "rtxpro6000-server_llama-3.1-8b_tp1.csv")
    device = find_device("rtx-pro-6000-server")
    engines = {}
    for engine in ENGINES:
        tables = load_published(device, engine)
        forward = ComposedForward(architecture=TARGET, tables=tables)
        engines[engine] = {"source": tables.source, **error_of(forward, measured)}
        print(engine, f"{engines[engine]['forward']['mape']:.1%}")
    store(
        "compose_rtx_pro_6000_server",
        {
            "environment": environment("cpu"),
            "measured": "casys-kaist/LLMServingSim (MIT) operator profiles, vLLM 0.19 kernels",
            "rows": f"1..{MAX_ROWS}",
            "context": f"0..{MAX_CONTEXT}",
            "engines": engines,
            "tensor_parallel_2": two_devices(shared),
            "tile_forms": tile_forms(shared),
            "split_form": split_form(),
        },
    )


if __name__ == "__main__":
    main()
