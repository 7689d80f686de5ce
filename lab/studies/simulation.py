"""The simulated server against closed forms, and how long it takes.

    python -m lab.studies.simulation

A server that runs one sequence at a time, in steps of one second, is an M/D/1 queue: a million
requests for each load and seed against Pollaczek and Khinchine's mean and the exact 99th
percentile. The load of a run is itself random: 0.1 % more arrivals than asked for are 1 % more
waiting at a load of 0.9. So each run is also compared at the load that it had.

Then 10,000 requests with continuous batching, plain and with draft trees, on steps that cost about
what Llama-3.1-8B does on an H100: 8 ms, 10 us a sequence, 30 us a prompt token, 10 ns a sequence
and cached token.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from costmodel.planning.engines import engine_rules
from costmodel.planning.simulation.engine import SimulatedServer, simulate
from costmodel.planning.simulation.steps import PLAIN, Speculation, StepGrid
from costmodel.planning.traffic import FixedLength, LognormalLength, poisson_trace
from lab.studies.batch_means import summarise
from lab.studies.common import environment, store
from lab.studies.queueing import md1_waiting_quantile_s, md1_waiting_s

LOADS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
SEEDS = (0, 1, 2, 3)
QUEUE_REQUESTS = 1_000_000
BATCHED_REQUESTS = 10_000
CACHE_TOKENS = 400_000.0
TREE = Speculation.of(16, (0.25, 0.2, 0.2, 0.15, 0.1, 0.1))  # 2.95 tokens a step


def queue_run(load: float, seed: int, count: int = QUEUE_REQUESTS) -> dict[str, Any]:
    """One M/D/1 run: relative errors of the mean waiting and of its 99th percentile."""
    one = FixedLength(tokens=1)
    requests = poisson_trace(load, count, one, one, np.random.default_rng(seed))
    server = SimulatedServer(rules=engine_rules("vllm"), cache_tokens=CACHE_TOKENS, max_sequences=1)
    began = time.process_time()
    found = simulate(requests, server, lambda batch, prompt_tokens, context: 1.0)
    spent_s = time.process_time() - began
    mean_s = float(np.mean(found.waiting_s))
    exact_p99_s = md1_waiting_quantile_s(load, 1.0, 0.99)
    return {
        "load": load,
        "seed": seed,
        "requests": count,
        "mean_waiting_s": mean_s,
        "exact_s": md1_waiting_s(load, 1.0),
        "error": mean_s / md1_waiting_s(load, 1.0) - 1,
        "error_at_realised_load": mean_s / md1_waiting_s(requests.rate_per_s, 1.0) - 1,
        "p99_error": float(np.percentile(found.waiting_s, 99)) / exact_p99_s - 1,
        "cpu_s": round(spent_s, 2),
    }


def batched_run(rate_per_s: float, speculation: Speculation, seed: int = 0) -> dict[str, Any]:
    """10,000 requests of lognormal lengths, and whether a second run gives the same answer."""
    one, same = (_batched(rate_per_s, speculation, seed) for _ in range(2))
    return one | {"same_again": _timeless(one) == _timeless(same)}


def _timeless(run: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in run.items() if key != "cpu_s"}


def _batched(rate_per_s: float, speculation: Speculation, seed: int) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    requests = poisson_trace(
        rate_per_s,
        BATCHED_REQUESTS,
        LognormalLength(mean_tokens=1000, variation=0.7),
        LognormalLength(mean_tokens=400, variation=0.7),
        generator,
    )
    server = SimulatedServer(rules=engine_rules("vllm"), cache_tokens=CACHE_TOKENS)
    grid = StepGrid.of(_step_s, (0, 1, 64, 256), (0, 1, 1000, 8192), (0, 1000, 10_000))
    began = time.process_time()
    found = simulate(requests, server, grid, speculation, generator)
    spent_s = time.process_time() - began
    return {
        "rate_per_s": rate_per_s,
        "tokens_a_step": float(np.dot(speculation.committed[0], _counts(speculation))),
        "requests": BATCHED_REQUESTS,
        "steps": found.steps,
        "cpu_s": round(spent_s, 2),
        "summary": dataclasses.asdict(summarise(found)),
    }


def _counts(speculation: Speculation) -> Sequence[int]:
    return range(1, len(speculation.committed[0]) + 1)


def _step_s(batch: int, prompt_tokens: int, context: float) -> float:
    return 8e-3 + 1e-5 * batch + 3e-5 * prompt_tokens + 1e-8 * batch * context


def main() -> None:
    queues = []
    for load in LOADS:
        runs = [queue_run(load, seed) for seed in SEEDS]
        queues += runs
        errors = ", ".join(f"{run['error']:+.2%}" for run in runs)
        realised = ", ".join(f"{run['error_at_realised_load']:+.2%}" for run in runs)
        print(f"load {load}: error {errors}; at the realised load {realised}")
    batched = [batched_run(rate, tree) for tree in (PLAIN, TREE) for rate in (0.2, 2.0, 8.0)]
    for run in batched:
        print(f"{run['rate_per_s']} requests/s: {run['steps']} steps in {run['cpu_s']} s")
    store("simulation", {"environment": environment(), "md1": queues, "batched": batched})


if __name__ == "__main__":
    main()
