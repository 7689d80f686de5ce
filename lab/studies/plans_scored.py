"""Plans of public servers beside rivals on the very same rows; only errors are stored.

    python -m lab.studies.plans_scored FOLDER [--before FILE] [--fit]

FOLDER has `inferencex.csv` (points of SemiAnalysis's InferenceX with two rivals' times,
inference-sim/inference-sim @ 129e0b8), and `error_records.csv` and
`llmservingsim_error_records_matched.csv` (H100 servers of vLLM 0.15.1 by load,
inference-sim/sim-to-real-accuracy-validation @ dcec3fd). FILE is this result at another commit.

What these rows were used for: scenarios are parted by the sha256 of their names, and a choice looks
at `fit` and `choice` alone. Llama-70B's points of InferenceX are among the 1,043 that engines'
overheads were fitted on (`capacity_accuracy`); `unfitted` leaves them out. How experts are loaded,
and Blackwell's 4-bit ones, were chosen with all rows of Mixtral, Scout and gpt-oss in sight.

InferenceX's lengths are drawn from 0.8 to 1 of the nominal ones. Its closed loop starts with all
requests at once and serves ten times as many: the mean time to the first token is a tenth of the
start's, simulated, and nine of the plan's; where the cache holds fewer, the rest waits. Servers by
load run the rate times the measured seconds of a request at once; each has 23 to 50 prompts, which
are cached but for a block. Targets that no list has are read from the configs that
aiconfigurator-core carries, as from a hub.

`--fit` puts each engine's seconds of a request outside of its steps (`front_s`) into
calibrations/engines.yaml: those of the least mean error of the time to the first token over the
`fit` part, in which every source of servers weighs the same.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.catalog import TargetEntry, resolve_target
from costmodel.errors import InputError, RooftreeError
from costmodel.io import read_json
from costmodel.planning.accuracy import INTERVAL, relative_error, slower_error
from costmodel.planning.batching import Cycle, cycle_work, engine_overheads
from costmodel.planning.request import PlanRequest, Precision, ServingPolicy
from costmodel.planning.search import make_server, plan
from costmodel.planning.servers import OperatingPoint, Server
from costmodel.planning.simulation.engine import SimulatedServer, simulate
from costmodel.planning.simulation.steps import exact_steps
from costmodel.planning.sources import forward_for
from costmodel.planning.traffic import Trace, Traffic
from costmodel.profile.store import ProfileStore
from integrations.aiconfigurator.package import data_folder
from lab.studies.capacity_accuracy import write_overheads
from lab.studies.common import PUBLISHED, store

Seconds = dict[str, float]  # by METRICS
METRICS = ("tpot", "ttft")
CHECKPOINTS, WORKLOADS = PUBLISHED["checkpoints"], PUBLISHED["workloads"]
GPUS = {"h100": "h100-sxm"}
WEIGHTS = {"bf16": "bfloat16", "fp8": "fp8_block", "fp4": "nvfp4"}
FITTED = "llama-3.1-70b-instruct"
RIVALS = {"AISimulate": "aisimulate", "AIConfigurator": "aic"}
MEAN_LENGTH, WAVES = 0.9, 10  # InferenceX's share of nominal lengths, requests of each client
BLOCK = 16  # tokens of a prompt that are computed where the rest is cached
LOADED = {
    "H100 by load": "error_records.csv",
    "H100 beside LLMServingSim": "llmservingsim_error_records_matched.csv",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRow:
    """A server's seconds by METRICS, measured, planned and by rivals, or why it is not planned.

    `labels`: the groups it counts in. `errors`: expected, and upwards.
    """

    labels: tuple[str, ...]
    part: str
    engine: str
    measured: Seconds
    rivals: dict[str, Seconds]
    planned: Seconds = dataclasses.field(default_factory=dict)
    errors: tuple[float, float] = (0.0, 0.0)
    refusal: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a row is planned as; `running`: requests at once, and their weight in the mean.

    `polls`: steps between two looks of the engine's scheduler at arrivals.
    """

    target: str
    place: tuple[str, int]  # GPU and degree
    lengths: Sequence[float]
    running: tuple[tuple[float, float], ...]
    settings: dict[str, Any]
    closed_loop: bool = False
    polls: int = 1


def inferencex(path: Path) -> Iterator[ScoredRow]:
    """The points of InferenceX's closed loops."""
    with path.open(encoding="utf-8", newline="") as stream:
        for line in csv.DictReader(stream):
            model, engine, gpu = line["model"], line["engine"], line["gpu"]
            dense, ranks, requests = model == FITTED, int(line["dp"]), int(line["concurrency"])
            groups = [gpu, engine, model, f"{model} {engine} {gpu}"]
            groups += ["dense-on-vllm"] * (dense and engine == "vllm") + ["unfitted"] * (not dense)
            row = ScoredRow(
                labels=("InferenceX", *(f"InferenceX, {group}" for group in groups)),
                part=part_of(line["scenario"]), engine=engine.replace("tensorrt-llm", "trtllm"),
                measured={m: float(line[f"{m}_ms_mean"]) / 1e3 for m in METRICS},
                rivals={name: {m: float(line[f"{key}_{m}_ms"]) / 1e3 for m in METRICS
                               if line[f"{key}_{m}_ms"]} for name, key in RIVALS.items()},
            )  # fmt: skip
            weights = "fp8" if dense and line["precision"] == "fp8" else WEIGHTS[line["precision"]]
            # Types of caches as InferenceX's scripts say (SemiAnalysisAI/InferenceX @ 843c625).
            hopper = gpu[0] == "h" and (engine == "sglang" or model.startswith("gpt-oss"))
            wide = hopper or line["precision"] == "bf16"
            version = re.match(r"vllm/\S+:v(\d[\d.]*)", line["engine_image"])
            # They start SGLang on Blackwell with --scheduler-recv-interval, but for GLM-5 in FP8.
            polls = 30 if requests >= 16 and model != "glm-5" else 10
            often = engine != "sglang" or gpu[0] == "h" or f"{model} {weights}" == "glm-5 fp8_block"
            yield scored(row, Asked(
                target=CHECKPOINTS.get(model, model),
                place=(GPUS.get(gpu, gpu), int(line["n_gpus"]) // ranks),
                lengths=(MEAN_LENGTH * int(line["isl"]), MEAN_LENGTH * int(line["osl"])),
                running=((requests / ranks, 1.0),), closed_loop=True,
                polls=1 if often else polls,
                settings={
                    "engine": row.engine,
                    "engine_version": version[1] if version else "",
                    "precision": Precision(
                        weights=None if model.startswith("gpt-oss") else weights,
                        cache="bfloat16" if wide else "fp8",
                    ),
                    "expert_parallel": int(line["ep"]) > 1, "data_parallel": ranks,
                    "most_running": requests,
                },
            ))  # fmt: skip


def by_load(path: Path, source: str) -> Iterator[ScoredRow]:
    """The stages of the H100 servers, or their means over stages where those alone are stated."""
    seen: dict[tuple[str, ...], dict[str, Any]] = {}
    with path.open(encoding="utf-8", newline="") as stream:
        for line in csv.DictReader(stream):
            folder = Path(line["experiment_folder"]).name
            place = folder, line["stage_index"], line["model"], line["hardware"], line["tp"]
            cell = seen.setdefault(place, {"rivals": defaultdict(dict), "measured": {}})
            cell["fp8"] = line["precision"] == "FP8"
            cell["load"] = next(n for n in WORKLOADS if n in f"{line['workload']} {folder}")
            cell["step_tokens"] = int(float(line["max_num_batched_tokens"]))
            metric = line["metric_name"].replace("itl", "tpot").removesuffix("_mean")
            cell["measured"][metric] = float(line["actual"]) / 1e3
            if metric in METRICS:
                cell["rivals"][line["simulator"]][metric] = float(line["predicted"]) / 1e3
    staged = any(int(place[1]) >= 0 for place in seen)
    for (folder, index, model, gpu, degree), cell in seen.items():
        if staged and int(index) < 0:
            continue
        load = WORKLOADS[cell["load"]]
        lengths, stages = (load["prompt"], load["output"]), load["stages"]
        kept = [stages[int(index)]] if staged else stages
        kind = "experts" if re.search("Mixtral|Llama-4", model) else "dense"
        row = ScoredRow(
            labels=(source, f"{source}, {kind}", f"{source}, {model}"), part=part_of(folder),
            engine="vllm", measured=cell["measured"], rivals=dict(cell["rivals"]),
        )  # fmt: skip
        end_s, weights = cell["measured"]["e2e"], "fp8_dynamic" if cell["fp8"] else None
        yield scored(row, Asked(
            target=CHECKPOINTS.get(model, model), place=(GPUS[gpu.lower()], int(float(degree))),
            lengths=lengths, running=tuple((r * end_s, r * spent_s) for r, spent_s in kept),
            settings={"engine_version": "0.15.1", "step_tokens": cell["step_tokens"],
                      "most_running": 128, "precision": Precision(weights=weights),
                      "prefix_hits": 1 - BLOCK / lengths[0]},
        ))  # fmt: skip


@cache
def target_of(name: str) -> TargetEntry | InputError:
    """A known target, or by InferenceX's label the config that aiconfigurator-core carries."""
    folder = data_folder().parents[1] / "model_configs"
    configs = {p.name.partition("--")[2].lower(): p for p in sorted(folder.glob("*_config.json"))}
    try:
        return resolve_target(str(configs.get(f"{name}_config.json", name)))
    except InputError as failure:
        return failure


def scored(row: ScoredRow, asked: Asked) -> ScoredRow:
    """The row with its planned means, or with the refusal."""
    traffic = Traffic(prompt_tokens=asked.lengths[0], output_tokens=asked.lengths[1])
    try:
        target = target_of(asked.target)
        if isinstance(target, InputError):
            raise target
        request = PlanRequest(
            target=asked.target, gpus=asked.place[:1], degrees=asked.place[1:], traffic=traffic,
            rate=1.0, **asked.settings,
        )  # fmt: skip
        forward = forward_for(request, target, asked.place, ProfileStore())
        server = make_server(request, forward, None)
        if request.engine_version == "0.10.2":  # InferenceX's scripts ask for overlapping
            rules = dataclasses.replace(server.rules, overlaps_host=True)
            server = dataclasses.replace(server, rules=rules)
        most = max(min(server.most_running(traffic), request.most_running), 1)
        means = [means_s(server, traffic, min(n, most), n - most, asked) for n, _ in asked.running]
    except RooftreeError as failure:
        return dataclasses.replace(row, refusal=failure.problem)
    parts = [part for _, part in asked.running]
    planned = {n: float(np.average([one[n] for one in means], weights=parts)) for n in means[0]}
    bar = relative_error(forward.origin, request.engine, None, 1.0, version=request.engine_version)
    errors = bar, slower_error(forward, server.rules, bar)
    return dataclasses.replace(row, planned=planned, errors=errors)


def means_s(
    server: Server, traffic: Traffic, running: float, waiting: float, asked: Asked
) -> Seconds:
    """Mean seconds of a server that runs so many requests at once while others wait."""
    work = cycle_work(server.forward, server.rules, traffic, max(running, 1.0), Cycle())
    tpot_s = server.overheads.time_per_token_s(work, overlaps_host=server.rules.overlaps_host)
    point = server.best(traffic, max(round(running), 1))
    polled_s = point.ttft_s + (asked.polls - 1) / 2 * tpot_s
    first_s = polled_s + max(waiting, 0.0) / point.requests_per_s
    if asked.closed_loop:
        first_s += (start_s(server, traffic, point) - polled_s) / WAVES
    return {"tpot": tpot_s, "ttft": first_s}


def start_s(server: Server, traffic: Traffic, point: OperatingPoint) -> float:
    """Mean simulated seconds to the first token of requests that all come at once."""
    ranks = server.forward.ranks
    prompts = np.full(point.running * ranks, round(traffic.prompt_tokens))
    limits = SimulatedServer(
        rules=server.rules, cache_tokens=server.cache_tokens(), max_sequences=point.running,
        held_tokens=server.held_tokens, ranks=ranks, front_s=server.overheads.front_s,
    )  # fmt: skip
    trace = Trace(arrival_s=0.0 * prompts, prompt_tokens=prompts, output_tokens=0 * prompts + 1)
    return float(simulate(trace, limits, exact_steps(server, [point])).first_s.mean())


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
    for metric in METRICS if kept else ():
        off = np.array([row.planned[metric] / row.measured[metric] for row in kept])
        low, high = INTERVAL * np.array([row.errors for row in kept]).T
        inside = np.mean((-np.log(off) > -low) & (-np.log(off) < high))
        score[metric] = _errors(off) | {"inside": round(float(inside), 4)}
        score[metric]["rivals"] = dict(_rivals(rows, metric))
    return score


def _rivals(rows: list[ScoredRow], metric: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of each rival: its rows, and both errors on the rows that both have."""
    for name in sorted({name for row in rows for name in row.rivals}):
        theirs = [row for row in rows if metric in row.rivals.get(name, {})]
        both = [row for row in theirs if not row.refusal]
        if both:
            measured = np.array([row.measured[metric] for row in both])
            off = _errors(np.array([row.rivals[name][metric] for row in both]) / measured)
            ours = _errors(np.array([row.planned[metric] for row in both]) / measured)
            count = {"rows": len(theirs), "both": len(both)}
            yield name, count | {"mean": off["mean"], "ours": ours["mean"]}


def fit_front(rows: Sequence[ScoredRow]) -> dict[str, float]:
    """Seconds outside of steps of each engine: a weighted median of what the fit part lacks."""
    fitted = {}
    for engine in sorted({row.engine for row in rows}):
        own = [r for r in rows if r.engine == engine and r.part == "fit" and not r.refusal]
        measured, planned = (np.array([s["ttft"] for s in side]) for side in
                             zip(*((r.measured, r.planned) for r in own), strict=True))  # fmt: skip
        sources = [row.labels[0] for row in own]
        weights = 1 / (measured * [sources.count(source) for source in sources])
        lacking_s, order = measured - planned, np.argsort(measured - planned)
        half = np.searchsorted(np.cumsum(weights[order]), weights.sum() / 2)
        more_s = float(lacking_s[order][half])
        fitted[engine] = max(engine_overheads(engine).front_s + more_s, 0.0)
    return fitted


def _errors(ratios: Any) -> dict[str, float]:
    means = np.mean(np.abs(ratios - 1)), np.mean(ratios - 1)
    return {name: round(float(one), 4) for name, one in zip(("mean", "bias"), means, strict=True)}


def speculating(name: str) -> dict[str, dict[str, float]]:
    """Planned over measured ms a token of a server that speculates, by requests and drafted."""
    one, result = PUBLISHED["speculating"][name], {}
    for running, drafted, committed, measured_ms in one["cells"]:
        roots = np.roots([1.0] * drafted + [1 - committed]) if drafted else np.zeros(1)
        rate = max(root.real for root in roots if abs(root.imag) < 1e-9)  # sum of its powers
        request = PlanRequest(
            target=one["target"], gpus=("h100-sxm",), degrees=(one["gpus"],), rate=1.0,
            traffic=Traffic(prompt_tokens=one["tokens"][0], output_tokens=one["tokens"][1]),
            engine=one["engine"], engine_version=one["version"],
            policy=ServingPolicy.parse(f"chain:{drafted}" if drafted else "plain"),
            acceptance=f"{rate:.6f}" if drafted else None,
            drafter=one["drafter"] if drafted else None,
        )  # fmt: skip
        points = {point.running: point for point in plan(request).options[0].points}
        planned_ms = 1e3 * points[running].tpot_s
        times = {"measured_ms": measured_ms, "planned_ms": round(planned_ms, 3)}
        times["error"] = round(planned_ms / measured_ms - 1, 4)
        result[f"{running} at once, {drafted} drafted"] = times
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--before", type=Path, help="this result at another commit")
    parser.add_argument("--fit", action="store_true", help="fit the front ends' seconds instead")
    options = parser.parse_args()
    rows = [r for name, file in LOADED.items() for r in by_load(options.folder / file, name)]
    rows += inferencex(options.folder / "inferencex.csv")
    if options.fit:
        print(fitted := fit_front(rows))
        write_overheads({engine: {"front_s": front_s} for engine, front_s in fitted.items()})
        return
    groups = scores(rows)
    before = read_json(options.before)["groups"] if options.before else {}
    groups = {name: group | {"before": before.get(name)} for name, group in groups.items()}
    drafted = {name: speculating(name) for name in PUBLISHED["speculating"]}
    store("plans_scored", {"groups": groups, "speculating": drafted})


if __name__ == "__main__":
    main()
