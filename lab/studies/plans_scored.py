"""Plans of public servers beside rivals on the very same rows; only errors are stored.

    python -m lab.studies.plans_scored FOLDER [--before FILE]

FOLDER has `inferencex.csv` (points of SemiAnalysis's InferenceX with two rivals' times,
inference-sim/inference-sim @ 129e0b8), and `error_records.csv` and
`llmservingsim_error_records_matched.csv` (H100 servers of vLLM 0.15.1 by load,
inference-sim/sim-to-real-accuracy-validation @ dcec3fd). FILE is this result at another commit.

What these rows were used for: scenarios are parted by the sha256 of their names, and a choice looks
at `fit` and `choice` alone. Llama-70B's points of InferenceX are among the 1,043 that engines'
overheads were fitted on (`capacity_accuracy`), so `unfitted` leaves them out. Routed experts over
evenly loaded ones were chosen on all servers of Mixtral, Scout and gpt-oss here.

InferenceX's lengths are drawn from 0.8 to 1 of the nominal ones. Its closed loop starts with all
requests at once and serves ten times as many: the mean time to the first token is a tenth of the
start's, simulated, and nine of the plan's; where the cache holds fewer, the rest waits. Requests at
once of servers by load are the rate times the measured seconds of a request; each has 23 to 50
distinct prompts: rows are planned with prompts computed and, but for a block, cached. Targets that
no list has are read from the configs that aiconfigurator-core carries, as from a hub.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from costmodel.catalog import TargetEntry, resolve_target
from costmodel.compose.published import data_folder
from costmodel.errors import InputError, RooftreeError
from costmodel.planning.accuracy import INTERVAL, relative_error, slower_error
from costmodel.planning.batching import Cycle, cycle_work
from costmodel.planning.request import PlanRequest, Precision
from costmodel.planning.search import make_server
from costmodel.planning.servers import OperatingPoint, Server
from costmodel.planning.simulation.engine import SimulatedServer, simulate
from costmodel.planning.simulation.steps import exact_steps
from costmodel.planning.sources import forward_for
from costmodel.planning.traffic import Trace, Traffic
from costmodel.profile.store import ProfileStore
from lab.studies.common import store

NAMES = {
    "meta-llama/Llama-3.1-70B-Instruct": "meta-llama/Llama-3.3-70B-Instruct",
    "RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic":
        "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "mistralai/Mixtral-8x22B-Instruct-v0.1": "mistralai/Mixtral-8x22B-v0.1",
}  # fmt: skip
ENGINES = {"tensorrt-llm": "trtllm"}
GPUS = {"h100": "h100-sxm", "a100-80gb": "a100-sxm-80gb"}
# Published checkpoints by the label of InferenceX; experts in fp8 are stored in blocks.
SERVED = {
    "llama-3.1-70b-instruct": "meta-llama/Llama-3.3-70B-Instruct",
    "deepseek-v3": "deepseek-ai/DeepSeek-R1-0528",
}  # fmt: skip
WEIGHTS = {"bf16": "bfloat16", "fp8": "fp8_block", "fp4": "nvfp4"}
OVERHEADS_FITTED = "llama-3.1-70b-instruct"
# Prompt and answer tokens, and (requests a second, seconds) of the stages of each workload.
LOADS = {
    "general-lite": (547, 248, ((2.5, 600), (6, 600))),
    "general": (547, 248, ((8, 600), (20, 600))),
    "codegen": (566, 247, ((5, 600), (10, 600))), "roleplay": (750, 251, ((6, 1200),)),
    "reasoning-lite": (1034, 1448, ((1, 1200),)), "reasoning": (1034, 1448, ((4, 1200),)),
}  # fmt: skip
LOADED = {
    "H100 by load": "error_records.csv",
    "H100 beside LLMServingSim": "llmservingsim_error_records_matched.csv",
}  # fmt: skip
MEAN_LENGTH = 0.9  # of InferenceX's nominal ones
BLOCK = 16  # tokens of a prompt that are computed where the rest is cached
WAVES = 10  # requests a client of InferenceX sends
RIVALS = {"AISimulate": "aisimulate", "AIConfigurator": "aic"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRow:
    """A server's seconds `tpot` and `ttft`, measured, planned and by rivals, or why not planned.

    `labels`: the groups it counts in. `cached`: with all but a block of the prompt cached.
    `errors`: expected, and upwards.
    """

    labels: tuple[str, ...]
    part: str
    measured: dict[str, float]
    rivals: dict[str, dict[str, float]]
    planned: dict[str, float] = dataclasses.field(default_factory=dict)
    errors: tuple[float, float] = (0.0, 0.0)
    refusal: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What a row is planned as: target, GPU and degree, lengths, and (requests at once, weight)."""

    target: str
    place: tuple[str, int]
    lengths: tuple[float, float]
    running: tuple[tuple[float, float], ...]
    settings: dict[str, Any]


def inferencex(path: Path) -> Iterator[ScoredRow]:
    """The points of InferenceX's closed loops."""
    with path.open(encoding="utf-8", newline="") as stream:
        for line in csv.DictReader(stream):
            model, engine, gpu = line["model"], line["engine"], line["gpu"]
            ranks, source = int(line["dp"]), "InferenceX"
            fitted = () if model == OVERHEADS_FITTED else (f"{source}, unfitted",)
            dense = (f"{source}, dense on vllm",) if (fitted, engine) == ((), "vllm") else ()
            labels = (source, *fitted, *dense, *(f"{source}, {n}" for n in (gpu, engine, model)))
            rivals = {
                name: {metric: float(line[f"{key}_{metric}_ms"]) / 1e3
                       for metric in ("tpot", "ttft") if line[f"{key}_{metric}_ms"]}
                for name, key in RIVALS.items()
            }  # fmt: skip
            row = ScoredRow(
                labels=(*labels, f"{source}, {model} {engine} {gpu}"),
                part=part_of(line["scenario"]), rivals=rivals,
                measured={m: float(line[f"{m}_ms_mean"]) / 1e3 for m in ("tpot", "ttft")},
            )  # fmt: skip
            weights: str | None = WEIGHTS[line["precision"]]
            weights = "fp8" if (fitted, weights) == ((), "fp8_block") else weights
            version = re.match(r"vllm/\S+:v(\d[\d.]*)", line["engine_image"])
            settings = {
                "engine": ENGINES.get(engine, engine),
                "engine_version": version[1] if version else "",
                "precision": Precision(
                    weights=None if model.startswith("gpt-oss") else weights,
                    cache=cache_of(model, engine, gpu, line["precision"]),
                ),
                "expert_parallel": int(line["ep"]) > 1, "data_parallel": ranks,
            }  # fmt: skip
            yield scored(row, Planned(
                target=SERVED.get(model, model), place=(gpu, int(line["n_gpus"]) // ranks),
                lengths=(int(line["isl"]), int(line["osl"])), settings=settings,
                running=((int(line["concurrency"]) / ranks, 1.0),),
            ), closed=True)  # fmt: skip


def cache_of(model: str, engine: str, gpu: str, precision: str) -> Literal["bfloat16", "fp8"]:
    """The type of InferenceX's caches, as its scripts say (SemiAnalysisAI/InferenceX @ 843c625)."""
    hopper = gpu in ("h100", "h200") and (engine == "sglang" or model.startswith("gpt-oss"))
    return "bfloat16" if hopper or precision == "bf16" else "fp8"


def by_load(path: Path, source: str) -> Iterator[ScoredRow]:
    """The stages of the H100 servers, or their means over stages where those alone are stated."""
    seen: dict[tuple[str, ...], dict[str, Any]] = {}
    with path.open(encoding="utf-8", newline="") as stream:
        for line in csv.DictReader(stream):
            folder = Path(line["experiment_folder"]).name
            place = folder, line["stage_index"], line["model"], line["hardware"], line["tp"]
            cell = seen.setdefault(place, {"rivals": defaultdict(dict), "measured": {}})
            cell["fp8"] = line["precision"] == "FP8"
            cell["load"] = next((n for n in LOADS if n in folder), line["workload"])
            metric = line["metric_name"].replace("itl", "tpot").removesuffix("_mean")
            cell["measured"][metric] = float(line["actual"]) / 1e3
            if metric in ("tpot", "ttft"):
                cell["rivals"][line["simulator"]][metric] = float(line["predicted"]) / 1e3
    staged = any(int(place[1]) >= 0 for place in seen)
    for (folder, index, model, gpu, degree), cell in seen.items():
        if staged and int(index) < 0:
            continue
        prompt, output, stages = LOADS[cell["load"]]
        kept = [stages[int(index)]] if staged else stages
        end_s = cell["measured"].pop("e2e")
        kind = "experts" if re.search("Mixtral|Llama-4", model) else "dense"
        row = ScoredRow(
            labels=(source, f"{source}, {kind}", f"{source}, {model}"), part=part_of(folder),
            measured=cell["measured"], rivals=dict(cell["rivals"]),
        )  # fmt: skip
        settings = {
            "engine_version": "0.15.1",
            "precision": Precision(weights="fp8_dynamic" if cell["fp8"] else None),
        }
        yield scored(row, Planned(
            target=NAMES.get(model, model), place=(gpu.lower(), int(float(degree))),
            lengths=(prompt, output), settings=settings,
            running=tuple((rate * end_s, rate * spent_s) for rate, spent_s in kept),
        ))  # fmt: skip


@cache
def target_of(name: str) -> TargetEntry | InputError:
    """A known target, or one by the config of this name among those of aiconfigurator-core."""
    try:
        return resolve_target(name)
    except InputError as failure:
        folder = data_folder().parents[1] / "model_configs"
        configs = {path.name.lower(): path for path in sorted(folder.glob("*--*_config.json"))}
        found = [p for n, p in configs.items() if n.endswith(f"--{name.lower()}_config.json")]
        if not found:
            return failure
    try:
        return resolve_target(str(found[0]))
    except InputError as failure:
        return failure


def scored(row: ScoredRow, plan: Planned, *, closed: bool = False) -> ScoredRow:
    """The row with its planned means over (requests at once, weight), or with the refusal."""
    mean = MEAN_LENGTH if closed else 1.0
    traffic = Traffic(prompt_tokens=mean * plan.lengths[0], output_tokens=mean * plan.lengths[1])
    gpu, degree = GPUS.get(plan.place[0], plan.place[0]), plan.place[1]
    try:
        target = target_of(plan.target)
        if isinstance(target, InputError):
            raise target
        request = PlanRequest(
            target=plan.target, gpus=(gpu,), traffic=traffic, rate=1.0, degrees=(degree,),
            **plan.settings,
        )  # fmt: skip
        forward = forward_for(request, target, (gpu, degree), ProfileStore())
        server = make_server(request, forward, None)
        if request.engine_version == "0.10.2":  # InferenceX's scripts ask for overlapping
            rules = dataclasses.replace(server.rules, overlaps_host=True)
            server = dataclasses.replace(server, rules=rules)
        means = [_planned(server, traffic, number, closed=closed) for number, _ in plan.running]
    except RooftreeError as failure:
        return dataclasses.replace(row, refusal=failure.problem)
    weights = [weight for _, weight in plan.running]
    planned = {n: float(np.average([one[n] for one in means], weights=weights)) for n in means[0]}
    error = relative_error(
        forward.origin, request.engine, None, 1.0, version=request.engine_version
    )
    errors = error, slower_error(forward, server.rules, error)
    return dataclasses.replace(row, planned=planned, errors=errors)


def _planned(server: Server, traffic: Traffic, asked: float, *, closed: bool) -> dict[str, float]:
    """Mean seconds of a server that is asked for `asked` requests at once."""
    running = max(min(asked, server.most_running(traffic)), 1.0)
    work = cycle_work(server.forward, server.rules, traffic, running, Cycle())
    cached = dataclasses.replace(
        work, prompts_s=min(BLOCK / traffic.prompt_tokens, 1.0) * work.prompts_s
    )
    overlaps = server.rules.overlaps_host
    tpot_s, cached_s = (
        server.overheads.time_per_token_s(one, overlaps_host=overlaps) for one in (work, cached)
    )
    point = server.best(traffic, max(round(running), 1))
    first_s = point.ttft_s + max(asked - running, 0.0) / point.requests_per_s
    if closed:
        first_s += (_start_s(server, traffic, point) - point.ttft_s) / WAVES
    return {"tpot": tpot_s, "cached": cached_s, "ttft": first_s}


def _start_s(server: Server, traffic: Traffic, point: OperatingPoint) -> float:
    """Mean simulated seconds to the first token of requests that all come at once."""
    ranks = server.forward.ranks
    prompts = np.full(point.running * ranks, round(traffic.prompt_tokens))
    simulated = SimulatedServer(
        rules=server.rules, cache_tokens=server.cache_tokens(), max_sequences=point.running,
        held_tokens=server.held_tokens, ranks=ranks,
    )  # fmt: skip
    trace = Trace(
        arrival_s=np.zeros(len(prompts)), prompt_tokens=prompts, output_tokens=np.ones_like(prompts)
    )
    return float(simulate(trace, simulated, exact_steps(server, [point])).first_s.mean())


def part_of(scenario: str) -> str:
    """`fit`, `choice` or `test`, by a name alone."""
    return ("fit", "fit", "choice", "test")[hashlib.sha256(scenario.encode()).digest()[0] % 4]


def scores(rows: list[ScoredRow]) -> dict[str, Any]:
    """Per group, of all rows and of the test: coverage, errors, rivals' on the rows they have."""
    groups: dict[str, list[ScoredRow]] = defaultdict(list)
    for row in rows:
        for label in row.labels:
            groups[label].append(row)
            if row.part == "test":
                groups[f"{label}, test"].append(row)
    return {name: _score(group) for name, group in sorted(groups.items())}


def _score(rows: list[ScoredRow]) -> dict[str, Any]:
    kept = [row for row in rows if not row.refusal]
    score: dict[str, Any] = {"rows": len(rows), "planned": len(kept)}
    score["refusals"] = sorted({row.refusal for row in rows if row.refusal})
    for metric, name in (("tpot", "tpot"), ("tpot", "cached"), ("ttft", "ttft")) if kept else ():
        off = np.array([row.planned[name] / row.measured[metric] for row in kept])
        score[name] = _errors(off)
        low, high = INTERVAL * np.array([row.errors for row in kept]).T
        score[name]["inside"] = float(np.mean((-np.log(off) > -low) & (-np.log(off) < high)))
        if name == metric:
            score[name]["rivals"] = dict(_rivals(rows, metric))
    return score


def _rivals(rows: list[ScoredRow], metric: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of each rival: its rows, and both errors on the rows that both have."""
    for name in sorted({name for row in rows for name in row.rivals}):
        theirs = [row for row in rows if metric in row.rivals.get(name, {})]
        both = [row for row in theirs if not row.refusal]
        if both:
            measured = np.array([row.measured[metric] for row in both])
            off = np.array([row.rivals[name][metric] for row in both]) / measured
            ours = np.array([row.planned[metric] for row in both]) / measured
            yield name, {
                "rows": len(theirs), "both": len(both),
                "mean": _errors(off)["mean"], "ours": _errors(ours)["mean"],
            }  # fmt: skip


def _errors(ratios: Any) -> dict[str, float]:
    return {"mean": float(np.mean(np.abs(ratios - 1))), "bias": float(np.mean(ratios - 1))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--before", type=Path, help="this result at another commit")
    options = parser.parse_args()
    rows = [r for name, file in LOADED.items() for r in by_load(options.folder / file, name)]
    groups = scores([*rows, *inferencex(options.folder / "inferencex.csv")])
    if options.before:
        before = json.loads(options.before.read_text(encoding="utf-8"))["groups"]
        for name, group in groups.items():
            group["before"] = before.get(name)
    store("plans_scored", {"groups": groups})


if __name__ == "__main__":
    main()
