"""Planned times per token of public servers that rivals are scored on; only errors are stored.

`python -m lab.studies.served_rows FOLDER --scored` runs it. FOLDER has `inferencex.csv` (points
of SemiAnalysis's InferenceX with two rivals' times, inference-sim/inference-sim @ 129e0b8), and
`error_records.csv` and `llmservingsim_error_records_matched.csv` (H100 servers of vLLM 0.15.1 by
load, inference-sim/sim-to-real-accuracy-validation @ dcec3fd). Nothing is fitted to these rows;
scenarios are parted by the sha256 of their names. InferenceX's lengths are 0.9 of the nominal ones.
Requests at once of servers by load are the rate times the measured seconds of a request; each has
23 to 50 distinct prompts: rows are planned with prompts computed and, but for a block, cached.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.catalog import resolve_target
from costmodel.errors import RooftreeError
from costmodel.planning.accuracy import INTERVAL, relative_error, slower_error
from costmodel.planning.batching import Cycle, cycle_work
from costmodel.planning.request import PlanRequest, Precision
from costmodel.planning.search import make_server
from costmodel.planning.sources import forward_for
from costmodel.planning.traffic import Traffic
from costmodel.profile.store import ProfileStore

NAMES = {
    "llama-3.1-70b-instruct": "meta-llama/Llama-3.3-70B-Instruct",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "deepseek-v3": "deepseek-ai/DeepSeek-R1-0528",
    "RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic":
        "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "mistralai/Mixtral-8x22B-Instruct-v0.1": "mistralai/Mixtral-8x22B-v0.1",
}  # fmt: skip
ENGINES = {"tensorrt-llm": "trtllm"}
GPUS = {"h100": "h100-sxm", "a100-80gb": "a100-sxm-80gb"}
# Prompt and answer tokens, and (requests a second, seconds) of the stages of each workload.
LOADS = {
    "general-lite": (547, 248, ((2.5, 600), (6, 600))),
    "general": (547, 248, ((8, 600), (20, 600))),
    "codegen": (566, 247, ((5, 600), (10, 600))), "roleplay": (750, 251, ((6, 1200),)),
    "reasoning-lite": (1034, 1448, ((1, 1200),)), "reasoning": (1034, 1448, ((4, 1200),)),
}  # fmt: skip
BLOCK = 16  # tokens of a prompt that are computed where the rest is cached


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRow:
    """A measured time per token, its rivals' and ours: `error` expected, and `slower` upwards."""

    group: str
    part: str
    measured_s: float
    rivals_s: dict[str, float]
    planned_s: float = float("nan")
    cached_s: float = float("nan")
    errors: tuple[float, float] = (0.0, 0.0)
    refusal: str = ""


def inferencex(path: Path) -> Iterator[ScoredRow]:
    """The points of InferenceX's closed loops."""
    with path.open(encoding="utf-8", newline="") as stream:
        for line in csv.DictReader(stream):
            row = ScoredRow(
                group=f"InferenceX {line['model']} {line['engine']} {line['gpu']}",
                part=part_of(line["scenario"]),
                measured_s=float(line["tpot_ms_mean"]) / 1e3,
                rivals_s={name: float(line[f"{key}_tpot_ms"]) / 1e3
                          for name, key in (("AISimulate", "aisimulate"), ("AIConfigurator", "aic"))
                          if line[f"{key}_tpot_ms"]},
            )  # fmt: skip
            weights = {"fp8": "fp8", "fp4": "nvfp4"}.get(line["precision"])
            weights = "fp8_block" if (weights, line["model"]) == ("fp8", "deepseek-v3") else weights
            version = line["engine_image"].partition(":v")[2].partition("-")[0]
            settings = {
                "engine": ENGINES.get(line["engine"], line["engine"]),
                "engine_version": version if line["engine"] == "vllm" else "",
                "precision": Precision(
                    weights=None if line["model"] == "gpt-oss-120b" else weights,
                    cache="fp8" if line["model"].startswith("llama") else "bfloat16",
                ),
                "expert_parallel": int(line["ep"]) > 1, "data_parallel": int(line["dp"]),
            }  # fmt: skip
            lengths = 0.9 * int(line["isl"]), 0.9 * int(line["osl"])
            place = line["model"], line["gpu"], int(line["n_gpus"]) // int(line["dp"])
            yield planned(
                row, place, lengths, [(int(line["concurrency"]) / int(line["dp"]), 1)], settings
            )


def by_load(path: Path) -> Iterator[ScoredRow]:
    """The stages of the H100 servers, or their means over stages where those alone are stated."""
    seen: dict[tuple[str, ...], dict[str, Any]] = {}
    with path.open(encoding="utf-8", newline="") as stream:
        for line in csv.DictReader(stream):
            folder = Path(line["experiment_folder"]).name
            place = folder, line["stage_index"], line["model"], line["hardware"], line["tp"]
            cell = seen.setdefault(place, {"rivals": {}, "fp8": line["precision"] == "FP8"})
            cell[line["metric_name"]] = float(line["actual"]) / 1e3
            cell["load"] = next((n for n in LOADS if n in folder), line["workload"])
            if line["metric_name"] == "itl_mean":
                cell["rivals"][line["simulator"]] = float(line["predicted"]) / 1e3
    staged = any(int(place[1]) >= 0 for place in seen)
    for (folder, index, model, gpu, degree), cell in seen.items():
        if staged and int(index) < 0:
            continue
        *lengths, stages = LOADS[cell["load"]]
        kept = [stages[int(index)]] if staged else stages
        running = [(rate * cell["e2e_mean"], rate * spent_s) for rate, spent_s in kept]
        row = ScoredRow(
            group=f"by load {model}", part=part_of(folder),
            measured_s=cell["itl_mean"], rivals_s=cell["rivals"],
        )  # fmt: skip
        settings = {
            "engine_version": "0.15.1",
            "precision": Precision(weights="fp8_dynamic" if cell["fp8"] else None),
        }
        yield planned(row, (model, gpu.lower(), int(float(degree))), lengths, running, settings)


def planned(
    row: ScoredRow,
    place: tuple[str, str, int],
    lengths: Any,
    running: list[tuple[float, float]],
    settings: dict[str, Any],
) -> ScoredRow:
    """The row with the mean time over (requests at once, weight), or with the refusal."""
    model, gpu = NAMES.get(place[0], place[0]), GPUS.get(place[1], place[1])
    traffic = Traffic(prompt_tokens=lengths[0], output_tokens=lengths[1])
    try:
        request = PlanRequest(
            target=model, gpus=(gpu,), traffic=traffic, rate=1.0, degrees=(place[2],), **settings
        )
        forward = forward_for(request, resolve_target(model), (gpu, place[2]), ProfileStore())
        server = make_server(request, forward, None)
        works = [
            cycle_work(forward, server.rules, traffic, max(b, 1.0), Cycle()) for b, _ in running
        ]
    except RooftreeError as failure:
        return dataclasses.replace(row, refusal=failure.problem)
    asked = settings["engine_version"] == "0.10.2"  # InferenceX's scripts ask for overlapping

    def mean_s(share: float) -> float:
        times = [
            server.overheads.time_per_token_s(
                dataclasses.replace(work, prompts_s=share * work.prompts_s),
                overlaps_host=asked or server.rules.overlaps_host,
            )
            for work in works
        ]
        return float(np.average(times, weights=[weight for _, weight in running]))

    error = relative_error(
        forward.origin, request.engine, None, 1.0, version=request.engine_version
    )
    return dataclasses.replace(
        row, planned_s=mean_s(1.0), cached_s=mean_s(min(BLOCK / lengths[0], 1.0)),
        errors=(error, slower_error(forward, server.rules, error)),
    )  # fmt: skip


def part_of(scenario: str) -> str:
    """`fit`, `choice` or `test`, by a name alone."""
    return ("fit", "fit", "choice", "test")[hashlib.sha256(scenario.encode()).digest()[0] % 4]


def scores(rows: list[ScoredRow]) -> dict[str, Any]:
    """Per group, of all rows and of the test: coverage, errors, rivals' on the rows they have."""
    groups: dict[str, list[ScoredRow]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
        groups["all"].append(row)
        if row.part == "test":
            groups["all, test"].append(row)
    return {name: _score(group) for name, group in sorted(groups.items())}


def _score(rows: list[ScoredRow]) -> dict[str, Any]:
    kept = [row for row in rows if not row.refusal]
    score: dict[str, Any] = {"rows": len(rows), "planned": len(kept)}
    score["refusals"] = sorted({row.refusal for row in rows if row.refusal})
    for name in ("planned", "cached") if kept else ():
        off = np.array([getattr(row, f"{name}_s") / row.measured_s - 1 for row in kept])
        score[name + "_error"] = {"mean": float(np.abs(off).mean()), "bias": float(off.mean())}
    if kept:
        log = np.array([np.log(row.measured_s / row.planned_s) for row in kept])
        low, high = INTERVAL * np.array([row.errors for row in kept]).T
        score["inside"] = float(np.mean((log > -low) & (log < high)))
    for name in sorted({name for row in kept for name in row.rivals_s}):
        both = [row for row in kept if name in row.rivals_s]
        theirs = np.array([row.rivals_s[name] / row.measured_s - 1 for row in both])
        ours = np.array([row.planned_s / row.measured_s - 1 for row in both])
        means = (float(np.abs(one).mean()) for one in (theirs, ours))
        score[name] = {"rows": len(both), **dict(zip(("mean", "ours"), means, strict=True))}
    return score
