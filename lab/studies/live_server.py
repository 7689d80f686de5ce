"""Plans against a live vLLM server: TTFT, TPOT and throughput, measured and planned, by cell.

    python -m lab.studies.live_server --python VLLM/bin/python --model FOLDER --work FOLDER

A profile is made by `rooftree calibrate vllm` first. Then a server is loaded at several
rates, plain and with n-gram drafts, and each cell's very requests are planned (`replayed`).
Nothing is fitted to the server; acceptance comes from its own counters. The folder keeps the
profile and the finished cells, so that a run that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.planning.acceptance import find_acceptance
from costmodel.planning.forwards import TargetForward
from costmodel.planning.request import PlanRequest, ServingPolicy
from costmodel.planning.search import make_server
from costmodel.planning.servers import Server
from costmodel.planning.simulation.percentiles import replay
from costmodel.planning.traffic import LognormalLength, Trace, Traffic, poisson_trace
from costmodel.profile.profile import Profile
from lab.studies.common import environment, read_prompts, store
from lab.studies.vllm_server import (
    Request,
    acceptance,
    load,
    metrics,
    read_url,
    spread,
    summary,
    vllm_environment,
    vllm_server,
)

ROOT = Path(__file__).parents[2]
SETS = ("alpaca", "gsm8k", "humaneval", "mbpp", "mt_bench", "wikitext2")
LONGEST_PROMPT, LONGEST_OUTPUT = 512, 160
OUTPUT = LognormalLength(mean_tokens=64, variation=0.5, most_tokens=LONGEST_OUTPUT)
STEADY_REQUESTS = 2000
FLOOR_REQUESTS, FLOOR_TOKENS = 8, 32
LOADS = (0.2, 0.4, 0.6, 0.8)  # shares of the planned plain throughput
LEAST_REQUESTS = 20  # of a cell
STEP_TOKENS = 8192  # what plans assume of vLLM


def calibrate(options: argparse.Namespace) -> Path:
    """The profile in the work folder, made now unless it is there."""
    path = options.work / "profile.yaml"
    if path.is_file():
        return path
    arguments = ["-m", "rooftree", "calibrate", "vllm", "--drafter", "ngram"]
    arguments += ["--target", str(options.model), "--output", str(path)]
    arguments += ["--batch", ",".join(str(b) for b in (1, 2, 4, 8) if b <= options.at_once)]
    arguments += ["--contexts", f"64,256,{LONGEST_PROMPT + LONGEST_OUTPUT}"]
    arguments += ["--time-budget", f"{options.calibration_s:g}s"]
    for option in ("enforce_eager=true", f"max_model_len={options.max_model_len}"):
        arguments += ["--engine-option", option]
    done = subprocess.run(
        [options.python, *arguments],
        env=vllm_environment(options.python) | {"PYTHONPATH": str(ROOT)},
    )
    if done.returncode:
        raise SystemExit(f"the calibration failed ({done.returncode}); see its messages above")
    return path


def server_arguments(options: argparse.Namespace, drafted: int) -> list[str]:
    """Arguments of a server that drafts so many tokens (0: plain)."""
    arguments = ["--dtype", "bfloat16", "--enforce-eager", "--no-enable-prefix-caching"]
    arguments += ["--max-model-len", str(options.max_model_len)]
    arguments += ["--max-num-seqs", str(options.at_once)]
    arguments += ["--max-num-batched-tokens", str(STEP_TOKENS)]
    if drafted:
        lookup = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
        config = lookup | {"num_speculative_tokens": drafted}
        arguments += ["--speculative-config", json.dumps(config)]
    return arguments


def prompts(options: argparse.Namespace) -> list[list[int]]:
    """Token ids of all prompts, the long ones cut to LONGEST_PROMPT."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(options.model))
    texts = [line["prompt"] for name in SETS for line in read_prompts(name, 40)]
    return [tokenizer.encode(text)[:LONGEST_PROMPT] for text in texts]


def requests_of(
    texts: Sequence[Sequence[int]], rate: float, count: int, seed: tuple[int, ...]
) -> tuple[Trace, list[int]]:
    """Poisson arrivals of drawn prompts and answer lengths, and the index of each prompt."""
    random = np.random.default_rng(seed)
    picked = random.integers(len(texts), size=count).tolist()
    drawn = poisson_trace(rate, count, OUTPUT, OUTPUT, random)
    lengths = np.array([len(texts[index]) for index in picked])
    return dataclasses.replace(drawn, prompt_tokens=lengths), picked


def planned_server(
    options: argparse.Namespace, profile: Path, traffic: Traffic, drafted: int, accepted: str | None
) -> Server:
    """The server that `rooftree plan` assumes for such requests; accepted: file of its rates."""
    request = PlanRequest(
        target=str(options.model), gpus=(str(profile),), traffic=traffic, rate=1.0,
        policy=ServingPolicy.parse(f"chain:{drafted}" if drafted else "plain"),
        acceptance=accepted, drafter="ngram" if drafted else None,
        utilisation=1.0, most_running=options.at_once,
    )  # fmt: skip
    found = find_acceptance(accepted, str(options.model)) if accepted else None
    return make_server(request, TargetForward(Profile.from_yaml(profile)), found)


def replayed(server: Server, requests: Trace, at_once: int) -> dict[str, Any]:
    """The plan's simulation of the cell's own requests."""
    result = replay(server, requests, at_once)
    span_s = float(result.last_s.max() - requests.arrival_s[0])
    tpot_s = result.tpot_s[~np.isnan(result.tpot_s)]
    return {
        "tokens_per_s": float(requests.output_tokens.sum()) / span_s,
        "ttft_s": spread(result.ttft_s.tolist()),
        "tpot_s": spread(tpot_s.tolist()),
    }


def errors(measured: dict[str, Any], planned: dict[str, Any], floor_s: float) -> dict[str, float]:
    """Planned over measured, less 1; TTFT also with the floor of the HTTP server added."""
    result = {"tokens_per_s": planned["tokens_per_s"] / measured["tokens_per_s"] - 1}
    for name, key in (("tpot_s", "mean"), ("tpot_s", "p95"), ("ttft_s", "mean"), ("ttft_s", "p95")):
        result[f"{name}.{key}"] = planned[name][key] / measured[name][key] - 1
    for key in ("mean", "p95"):
        with_floor_s = planned["ttft_s"][key] + floor_s
        result[f"ttft_s.{key}_with_floor"] = with_floor_s / measured["ttft_s"][key] - 1
    return result


def measure_floor(url: str, model: str, texts: Sequence[Sequence[int]], prefill_s: float) -> float:
    """Seconds of HTTP, queues and processes of one short request, beside its planned prefill."""
    prompt = next(text for text in texts if len(text) >= FLOOR_TOKENS)[:FLOOR_TOKENS]
    one = Request(arrival_s=0.0, prompt=prompt, output_tokens=1)
    load(url, model, [one])  # the first one allocates
    times = [load(url, model, [one])[0][0].ttft_s for _ in range(FLOOR_REQUESTS)]
    return float(np.median(times)) - prefill_s


def run_mode(
    options: argparse.Namespace, profile: Path, texts: list[list[int]], drafted: int
) -> None:
    """All cells of one speculation that the work folder does not have yet."""
    missing = [
        number
        for number in range(len(options.rates))
        if not cell_path(options, drafted, number).is_file()
    ]
    if not missing:
        return
    forward = TargetForward(Profile.from_yaml(profile))
    model = str(options.model)
    arguments, log = server_arguments(options, drafted), options.work / f"server_{drafted}.log"
    with vllm_server(options.python, model, arguments, log) as (url, http_cores):
        floor_s = measure_floor(url, model, texts, forward.prompt(FLOOR_TOKENS, 0, 1).total)
        for number in missing:
            record = run_cell(options, profile, texts, (url, drafted, number), floor_s)
            record |= {"floor_s": floor_s, "http_cores": sorted(http_cores)}
            cell_path(options, drafted, number).write_text(json.dumps(record), encoding="utf-8")
            shown = ", ".join(f"{name} {value:+.1%}" for name, value in record["errors"].items())
            print(f"{record['rate_per_s']:g}/s, {drafted} drafted: planned over measured: {shown}")


def run_cell(
    options: argparse.Namespace,
    profile: Path,
    texts: list[list[int]],
    place: tuple[str, int, int],
    floor_s: float,
) -> dict[str, Any]:
    """One cell, measured and planned; place: the server, drafted tokens, number of the rate."""
    url, drafted, number = place
    rate, model = options.rates[number], str(options.model)
    count = max(round(rate * options.seconds_per_cell), LEAST_REQUESTS)
    trace, picked = requests_of(texts, rate, count, (0, number))
    columns = zip(trace.arrival_s, picked, trace.output_tokens, strict=True)
    before = metrics(read_url(f"{url}/metrics"))
    requests = [
        Request(arrival_s=float(at), prompt=texts[index], output_tokens=int(tokens))
        for at, index, tokens in columns
    ]
    answers, client_share = load(url, model, requests)
    record: dict[str, Any] = {"rate_per_s": rate, "drafted": drafted}
    path = options.work / f"acceptance_{drafted}_{number}.json"
    if drafted:
        record["acceptance"] = acceptance(before, metrics(read_url(f"{url}/metrics")), drafted)
        path.write_text(json.dumps(record["acceptance"]), encoding="utf-8")
    accepted = str(path) if drafted else None
    server = planned_server(options, profile, trace.means, drafted, accepted)
    record["prompt_tokens"] = spread(trace.prompt_tokens.tolist())
    record["output_tokens"] = spread(trace.output_tokens.tolist())
    record["client_cpu_share"] = client_share
    record["measured"] = summary(answers)
    record["replayed"] = replayed(server, trace, options.at_once)
    return record | {"errors": errors(record["measured"], record["replayed"], floor_s)}


def cell_path(options: argparse.Namespace, drafted: int, number: int) -> Path:
    return options.work / f"cell_{drafted}_{options.rates[number]:g}.json"


def rates_of(options: argparse.Namespace, profile: Path, texts: list[list[int]]) -> list[float]:
    """Requests a second: shares of the plain server's planned throughput."""
    trace, _ = requests_of(texts, 1.0, STEADY_REQUESTS, (2,))
    server = planned_server(options, profile, trace.means, 0, None)
    points = server.points(trace.means, options.at_once)
    capacity = max(point.requests_per_s for point in points)
    return [float(f"{share * capacity:.3g}") for share in LOADS]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", type=Path, required=True, help="the interpreter with vLLM")
    parser.add_argument("--model", type=Path, required=True, help="the target's folder")
    parser.add_argument("--work", type=Path, required=True, help="folder for profile and cells")
    parser.add_argument("--drafted", type=int, default=3, help="n-gram tokens drafted")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--seconds-per-cell", type=float, default=55.0)
    parser.add_argument("--calibration-s", type=float, default=75.0)
    parser.add_argument("--max-model-len", type=int, default=1088)
    options = parser.parse_args()
    if not options.python.is_file():
        parser.error(f"--python: there is no {options.python}")
    if not (options.model / "config.json").is_file():
        parser.error(f"--model: {options.model} has no config.json")
    options.python, options.model = options.python.absolute(), options.model.resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    return options


def main() -> None:
    options = parse()
    before = environment("cpu")
    profile = calibrate(options)
    texts = prompts(options)
    options.rates = rates_of(options, profile, texts)
    modes = (0, options.drafted)
    for drafted in modes:
        run_mode(options, profile, texts, drafted)
    cells = [
        json.loads(cell_path(options, drafted, number).read_text(encoding="utf-8"))
        for drafted in modes
        for number in range(len(options.rates))
    ]
    settings = {"sets": SETS, "longest_prompt": LONGEST_PROMPT}
    settings |= {"output_lengths": dataclasses.asdict(OUTPUT), "at_once": options.at_once}
    result = {
        "environment": before,
        "settings": settings | {"seconds_per_cell": options.seconds_per_cell},
        "calibration": Profile.from_yaml(profile).model_dump(
            mode="json", include={"runtime", "provenance", "held_out"}, exclude_none=True
        ),
        "overall": {  # means of the errors' sizes
            f"mean_abs.{name}": float(np.mean([abs(cell["errors"][name]) for cell in cells]))
            for name in cells[0]["errors"]
        },
        "cells": cells,
    }
    print(json.dumps(result["overall"], indent=1))
    store("live_server", result)


if __name__ == "__main__":
    main()
