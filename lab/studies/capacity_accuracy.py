"""Predicted against measured time per output token of servers that nobody here ran.

    python -m lab.studies.capacity_accuracy [--write]

The measurements are `systems/silicon_sample.csv` of aiconfigurator-core (NVIDIA, Apache-2.0):
Llama-3.1-8B, Qwen3-32B and Llama-3.1-70B on H100, H200 and B200, aggregated serving: closed loops
that keep C requests in flight, of which B run at once where the cache does not hold all. Kernel
times come from profiles composed of its operator tables; `costmodel/planning/batching.py` has the
formula. For each pair of a GPU and a model the overheads are fitted on all other pairs, never on
rows of the pair that is scored. Those fitted on all rows are what plans use: `--write` puts them
into calibrations/engines.yaml. NVIDIA's own planner is scored on the same rows from
`lab/studies/results/nvidia_planner.json`.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from costmodel.catalog import find_target
from costmodel.compose.profiles import ComposeOptions, compose
from costmodel.io import read_yaml, shipped_directory
from costmodel.planning.batching import (
    FACTORS,
    OVERHEADS,
    SERVED,
    SHARED,
    Cycle,
    Overheads,
    TokenWork,
    cycle_work,
    seconds_per_token,
    work_columns,
)
from costmodel.planning.engines import EngineRules, engine_rules
from costmodel.planning.forwards import TargetForward
from costmodel.planning.request import ServingPolicy
from costmodel.planning.servers import Server
from costmodel.planning.traffic import Traffic
from costmodel.statistics import Array
from costmodel.weights import Weights
from integrations.aiconfigurator.package import data_folder
from lab.studies.common import RESULTS, environment, store

PLANNER = RESULTS / "nvidia_planner.json"
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

# Seconds of one unit of each fitted overhead: about its expected size.
_UNIT_S = {
    "layer_s": 1e-5, "prompt_layer_s": 1e-4, "step_s": 1e-3, "sequence_s": 1e-5, "device_s": 1e-3,
    "logits": 100.0,
}  # fmt: skip
# Weights of the priors, in log errors a unit for 500 rows: factors are near 1, overheads are hardly
# known, and engines differ from one another by about a third of a unit.
_FACTOR_WEIGHT, _SHARED_WEIGHT, _ENGINE_WEIGHT = 2.0, 0.1, 0.3
_PRIOR_ROWS = 500.0
# SERVED ones are fitted to the rows of `served_rows.py`.
FITTED = (*FACTORS, *OVERHEADS)
# Beyond a log error of this size rows count less and less.
_OUTLIER = 0.1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerRow:
    """One measured server. `pair`: (model, system), the group that is left out together."""

    id: str
    pair: tuple[str, str]
    engine: str
    weights: Weights
    devices: int
    traffic: Traffic
    concurrency: float
    cache_fp8: bool
    async_scheduling: bool | None
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredServer:
    """One measured time per output token, and the work that explains it."""

    engine: str
    overlaps_host: bool
    work: TokenWork
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
    traffic = Traffic(
        prompt_tokens=length * int(line["isl"]), output_tokens=length * int(line["osl"])
    )
    return ServerRow(
        id=line["id"], pair=(model, line["system"]),
        engine=line["backend"], weights=weights, devices=int(line["tp_size"]),
        traffic=traffic, concurrency=int(line["batch_size"]),
        cache_fp8=weights not in ("bfloat16", "fp8_block"),
        async_scheduling=True if inferencex and line["backend"] == "vllm" else None,
        seconds=float(line["silicon_tpot_ms"]) * 1e-3,
    )  # fmt: skip


def measured_server(row: ServerRow) -> MeasuredServer:
    """The work that a composed profile says a token of this server takes."""
    version = "0.11" if row.engine == "vllm" else ""
    rules = engine_rules(row.engine, version, async_scheduling=row.async_scheduling)
    forward = _forward(row.pair, row.engine, row.weights, row.cache_fp8, row.devices)
    work = steady_work(forward, rules, row.traffic, row.concurrency)
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


def steady_work(
    forward: TargetForward, rules: EngineRules, traffic: Traffic, concurrency: float
) -> TokenWork:
    """Work of one token of a closed loop of so many requests, in steady state."""
    server = Server(
        forward=forward, rules=rules, overheads=Overheads(), policy=ServingPolicy(kind="plain")
    )
    held = rules.memory.tokens_held(traffic.prompt_tokens, traffic.output_tokens)
    running = min(concurrency, max(server.cache_tokens() / held, 1.0))
    work = cycle_work(forward, rules, traffic, running, Cycle())
    return dataclasses.replace(work, waiting=concurrency - running)


def fit_overheads(rows: Sequence[MeasuredServer]) -> dict[str, Overheads]:
    """Overheads of each engine, and `shared` ones for an engine without rows.

    Robust least squares of log errors. Factors are shared by all engines; each overhead is a
    shared one plus the engine's difference, which a prior keeps small. The fitted vector has the
    factors, the shared overheads, then each engine's differences, in units.
    """
    engines = sorted({row.engine for row in rows})
    columns = work_columns([row.work for row in rows])
    overlaps = np.array([row.overlaps_host for row in rows])
    measured_s = np.array([row.seconds for row in rows])
    engine_index = np.array([engines.index(row.engine) for row in rows])
    places = np.arange(len(FITTED) + len(engines) * len(OVERHEADS))
    factors, differences = places < len(FACTORS), places >= len(FITTED)
    prior = np.where(factors, 1.0, 0.0)
    weights = np.where(differences, _ENGINE_WEIGHT, _SHARED_WEIGHT)
    weights = np.sqrt(len(rows) / _PRIOR_ROWS) * np.where(factors, _FACTOR_WEIGHT, weights)
    units_s = np.array([_UNIT_S[name] for name in OVERHEADS])
    # Only a layer may take less than its operators.
    least = np.where(np.array(OVERHEADS) == "layer_s", -np.inf, 0.0)

    def coefficients(x: Array) -> Array:
        """Factors and overheads in seconds [engines, COEFFICIENTS]."""
        own = x[differences].reshape(len(engines), -1) + x[len(FACTORS) : len(FITTED)]
        alike = np.broadcast_to(x[factors], (len(engines), len(FACTORS)))
        none = np.zeros((len(engines), len(SERVED)))
        return np.concatenate([alike, np.maximum(own, least) * units_s, none], axis=1)

    def residuals(x: Array) -> Array:
        predicted_s = seconds_per_token(columns, coefficients(x)[engine_index], overlaps)
        robust = np.arcsinh(np.log(predicted_s / measured_s) / _OUTLIER) * _OUTLIER
        return np.concatenate([robust, weights * (x - prior)])

    def overheads(row: Array) -> Overheads:
        return Overheads(**dict(zip(FITTED, map(float, row), strict=False)))

    bounds = (np.where(differences, -5.0, 0.0), np.inf)
    x = least_squares(residuals, np.where(factors, 1.0, 0.2), bounds=bounds).x
    shared = coefficients(np.where(differences, 0.0, x))[0]
    return dict(zip(engines, map(overheads, coefficients(x)), strict=True)) | {
        SHARED: overheads(shared)
    }


def write_overheads(fitted: Mapping[str, Mapping[str, float]]) -> None:
    """Put fitted numbers into the lines of engines in calibrations/engines.yaml."""
    path = shipped_directory() / "engines.yaml"
    text, table = path.read_text(encoding="utf-8"), read_yaml(path)
    for engine, numbers in fitted.items():
        row = ", ".join(f"{name}: {value:.4g}" for name, value in (table[engine] | numbers).items())
        text = re.sub(rf"^{re.escape(engine)}: .*", f"{engine}: {{{row}}}", text, flags=re.M)
    path.write_text(text, encoding="utf-8")


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


def _pair(row: ServerRow) -> str:
    return " on ".join(row.pair)


if __name__ == "__main__":
    main()
