"""Predicted against measured time per output token of servers that nobody here ran.

    python -m lab.studies.capacity_accuracy [--write]

The measurements are `systems/silicon_sample.csv` of aiconfigurator-core (NVIDIA, Apache-2.0):
Llama-3.1-8B, Qwen3-32B and Llama-3.1-70B on H100, H200 and B200, aggregated serving. Kernel times
come from profiles composed of its operator tables. For each pair of a GPU and a model the
overheads are fitted on all other pairs, never on rows of the pair that is scored. Those fitted on
all rows are what plans use: `--write` puts them into calibrations/engines.yaml. NVIDIA's own
planner is scored on the same rows from `lab/studies/results/nvidia_planner.json`.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np

from costmodel.catalog import find_target
from costmodel.compose.profiles import ComposeOptions, compose
from costmodel.planning.batching import Overheads
from costmodel.planning.engines import engine_rules
from costmodel.planning.forwards import TargetForward
from costmodel.weights import Weights
from integrations.aiconfigurator.package import data_folder
from lab.studies.fit_overheads import (
    FITTED,
    MeasuredServer,
    ServerLoad,
    fit_overheads,
    steady_work,
    write_overheads,
)

PLANNER = Path(__file__).parent / "results" / "nvidia_planner.json"
MODELS = {
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Llama-3.1-8B-Instruct",
    "Qwen/Qwen3-32B": "Qwen/Qwen3-32B",
    "meta-llama/Llama-3.1-70B": "meta-llama/Llama-3.1-70B-Instruct",
}
# The same models, where a row names NVIDIA's quantised checkpoint of it.
QUANTISED = {
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Llama-3.1-8B-Instruct",
    "nvidia/Qwen3-32B-NVFP4": "Qwen/Qwen3-32B",
}
SYSTEMS = {"h100_sxm": "h100-sxm", "h200_sxm": "h200", "b200_sxm": "b200"}
# The Llama-3.1-70B rows are InferenceX's (SemiAnalysis, Apache-2.0), whose scripts say: lengths
# drawn evenly from 0.8 to 1 of those named, a checkpoint with stored scales, a cache in fp8, and
# asynchronous scheduling of vLLM.
INFERENCEX_MODEL = "meta-llama/Llama-3.1-70B"
INFERENCEX_MEAN_LENGTH = 0.9


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerRow:
    """One measured server. `pair`: (model, system), the group that is left out together."""

    id: str
    pair: tuple[str, str]
    engine: str
    weights: Weights
    devices: int
    workload: ServerLoad
    cache_fp8: bool
    async_scheduling: bool | None
    seconds: float


def read_rows(lines: Iterable[dict[str, str]]) -> list[ServerRow]:
    """The rows of the named models and systems that serve prompts and answers together."""
    known = MODELS | QUANTISED
    return [
        _row(line, known[line["model_path"]])
        for line in lines
        if line["model_path"] in known and line["system"] in SYSTEMS and line["mode"] == "agg"
    ]


def _row(line: dict[str, str], model: str) -> ServerRow:
    inferencex = line["model_path"] == INFERENCEX_MODEL
    length = INFERENCEX_MEAN_LENGTH if inferencex else 1.0
    weights = line["gemm_quant_mode"] or "bfloat16"
    stored_scales = inferencex or line["model_path"] in QUANTISED
    if weights == "fp8" and not stored_scales:
        weights = "fp8_dynamic"
    workload = ServerLoad(
        prompt_tokens=length * int(line["isl"]), output_tokens=length * int(line["osl"]),
        concurrency=int(line["batch_size"]),
    )  # fmt: skip
    return ServerRow(
        id=line["id"], pair=(model, line["system"]),
        engine=line["backend"], weights=cast(Weights, weights), devices=int(line["tp_size"]),
        workload=workload, cache_fp8=weights not in ("bfloat16", "fp8_block"),
        async_scheduling=True if inferencex and line["backend"] == "vllm" else None,
        seconds=float(line["silicon_tpot_ms"]) * 1e-3,
    )  # fmt: skip


def measured_server(row: ServerRow) -> MeasuredServer:
    """The work that a composed profile says a token of this server takes."""
    version = "0.11" if row.engine == "vllm" else ""
    rules = engine_rules(row.engine, version, async_scheduling=row.async_scheduling)
    forward = _forward(row.pair, row.engine, row.weights, row.cache_fp8, row.devices)
    work = steady_work(forward, rules, row.workload)
    return MeasuredServer(
        engine=row.engine, overlaps_host=rules.overlaps_host, work=work, seconds=row.seconds
    )


@cache
def _forward(
    pair: tuple[str, str], engine: str, weights: Weights, cache_fp8: bool, devices: int
) -> TargetForward:
    options = ComposeOptions(
        target=find_target(pair[0]).architecture, device_name=SYSTEMS[pair[1]], engine=engine,
        tensor_parallel=devices, weights=weights, cache="fp8" if cache_fp8 else "bfloat16",
    )  # fmt: skip
    return TargetForward(compose(options), engine)


def leave_pairs_out(pairs: Sequence[Any], servers: Sequence[MeasuredServer]) -> np.ndarray:
    """Predicted seconds of every row, with overheads fitted on the rows of other pairs."""
    predicted = np.empty(len(servers))
    for left_out in sorted(set(pairs)):
        others = [s for pair, s in zip(pairs, servers, strict=True) if pair != left_out]
        overheads = fit_overheads(others)
        for i, server in enumerate(servers):
            if pairs[i] == left_out:
                mine = overheads.get(server.engine, overheads["shared"])
                predicted[i] = mine.time_per_token_s(
                    server.work, overlaps_host=server.overlaps_host
                )
    return predicted


def summary(predicted: np.ndarray, measured: np.ndarray, chosen: Sequence[bool]) -> dict[str, Any]:
    """Mean and median absolute relative error and bias of the chosen rows."""
    here = np.asarray(chosen, dtype=bool)
    error = predicted[here] / measured[here] - 1
    return {
        "rows": int(here.sum()),
        "mean": round(float(np.mean(np.abs(error))), 4),
        "median": round(float(np.median(np.abs(error))), 4),
        "bias": round(float(np.mean(error)), 4),
    }


def groups(
    rows: Sequence[ServerRow],
    label: Callable[[ServerRow], str],
    predicted: np.ndarray,
    chosen: np.ndarray,
) -> dict[str, Any]:
    """The summary of each group of the chosen rows."""
    measured = np.array([row.seconds for row in rows])
    labels = np.array([label(row) for row in rows])
    return {
        name: summary(predicted, measured, chosen & (labels == name))
        for name in sorted(set(labels[chosen]))
    }


def planner_seconds(rows: Sequence[ServerRow]) -> np.ndarray:
    """NVIDIA's planner's predictions; NaN where it predicts none."""
    stored = json.loads(PLANNER.read_text(encoding="utf-8"))["tpot_ms"]
    values = [stored.get(row.id) for row in rows]
    return np.array([np.nan if ms is None else ms * 1e-3 for ms in values])


def main() -> None:
    from lab.studies.common import environment, store

    path = data_folder().parent / "silicon_sample.csv"
    with path.open(encoding="utf-8", newline="") as stream:
        rows = read_rows(csv.DictReader(stream))
    servers = [measured_server(row) for row in rows]
    measured = np.array([row.seconds for row in rows])
    pairs = [row.pair for row in rows]
    predicted = leave_pairs_out(pairs, servers)
    planner = planner_seconds(rows)
    same = np.isfinite(planner)
    subsets = {"same": same, "all": np.ones(len(rows), dtype=bool)}
    result: dict[str, Any] = {
        "environment": environment("cpu"),
        "measured": "aiconfigurator-core silicon_sample.csv (NVIDIA, Apache-2.0)",
        "rows": {
            "same": "those NVIDIA's planner predicts",
            "all": "every row of the models and systems, aggregated serving",
        },
    }
    for name, chosen in subsets.items():
        result[name] = {"ours": summary(predicted, measured, chosen)}
        if name != "all":
            result[name]["planner"] = summary(planner, measured, chosen)
        print(name, result[name])

    def server(row: ServerRow) -> str:
        return f"{_pair(row)}, {row.engine}, {row.weights}"

    for label, key in (("pairs", _pair), ("servers", server)):
        result[label] = {
            "ours": groups(rows, key, predicted, same),
            "planner": groups(rows, key, planner, same),
        }
    overheads = fit_overheads(servers)
    planned = [
        overheads[server.engine].time_per_token_s(server.work, overlaps_host=server.overlaps_host)
        for server in servers
    ]
    result["shipped"] = summary(np.array(planned), measured, subsets["all"])
    result["overheads"] = {
        name: {key: float(f"{getattr(o, key):.4g}") for key in FITTED}
        for name, o in overheads.items()
    }
    store("capacity_accuracy", result)
    if "--write" in sys.argv:
        write_overheads(result["overheads"])


def kernel_seconds(server: MeasuredServer) -> float:
    """The work alone, without any fitted overhead."""
    return Overheads().time_per_token_s(server.work, overlaps_host=server.overlaps_host)


def _pair(row: ServerRow) -> str:
    return " on ".join(row.pair)


if __name__ == "__main__":
    main()
