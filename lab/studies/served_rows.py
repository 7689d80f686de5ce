"""Plans of servers that nobody here ran: 122 steady states with power, and two live traces.

    python -m lab.studies.served_rows FOLDER [--fit]

FOLDER holds `steady_state_itl.csv` (ml-energy/leaderboard @ 0cd52dab897c: vLLM of about 0.11) and
the live servers' `*__requests.jsonl` (casys-kaist/LLMServingSim @ 5daddb21a545: vLLM 0.19). Time
per token is the running requests over the tokens a second. Prompt lengths are not stored: 200
tokens are taken for chats, 250 for gpqa.

Models in the order of the sha256 of their names: every second one, from the first, is what `--fit`
fits the host's and power's few numbers to, and writes the host's; the others are the test. A row is
*starved* if its GPUs draw under 90 % of the most that fewer requests on the same model and GPUs
drew: they waited for the host. Such rows are not fitted to, and told apart.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from costmodel.catalog import resolve_target
from costmodel.errors import RooftreeError
from costmodel.planning.accuracy import INTERVAL, relative_error, slower_error
from costmodel.planning.batching import (
    COEFFICIENTS,
    Cycle,
    TokenWork,
    cycle_work,
    seconds_per_token,
    work_columns,
)  # fmt: skip
from costmodel.planning.forwards import POWER_EXPONENT, POWER_SHARE
from costmodel.planning.request import PlanRequest, Precision
from costmodel.planning.search import make_server
from costmodel.planning.servers import Server
from costmodel.planning.simulation.percentiles import replay
from costmodel.planning.sources import forward_for
from costmodel.planning.traffic import Trace, Traffic
from costmodel.profile.store import ProfileStore
from costmodel.statistics import Array
from lab.studies.capacity_accuracy import write_overheads
from lab.studies.common import environment, store

PROMPT_TOKENS = {"lm-arena-chat": 200.0, "gpqa": 250.0}
GPUS = {"H100": "h100-sxm", "B200": "b200"}
STARVED_SHARE = 0.9
OUTLIER = 0.1  # log error beyond which a row counts less and less
FITTED = {"step_s": 1e-3, "sequence_s": 1e-5, "plan_s": 1e-3}  # with the unit of each
LIVE = {
    "rtx-pro-6000-server": ("RTXPRO6000_Llama-3.1-8B", 128),
    "rtx-4090": ("RTX4090_Llama-3.1-8B", 256),
}
LIVE_TARGET = "meta-llama/Llama-3.1-8B-Instruct"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServedRow:
    """A measured row, with its server and work where it can be planned, else the refusal."""

    model: str
    gpu: str
    devices: int
    task: str
    output_tokens: float
    running: float
    tpot_s: float
    watts: float
    joules: float
    server: Server | None = None
    work: TokenWork | None = None
    refusal: str = ""


def read_rows(path: Path) -> list[ServedRow]:
    """Every row of the table, planned as `rooftree plan --engine vllm@0.11` does."""
    with path.open(encoding="utf-8", newline="") as stream:
        return [_row(line) for line in csv.DictReader(stream)]


def _row(line: dict[str, str]) -> ServedRow:
    devices, running = int(line["num_gpus"]), float(line["avg_batch_size"])
    weights, output = line["weight_precision"], float(line["avg_output_len"])
    row = ServedRow(
        model=line["model_id"], gpu=line["gpu_model"], devices=devices, task=line["task"],
        output_tokens=output, running=running,
        tpot_s=running / float(line["output_throughput_tokens_per_sec"]),
        watts=float(line["avg_power_watts"]), joules=float(line["energy_per_token_joules"]),
    )  # fmt: skip
    traffic = Traffic(prompt_tokens=PROMPT_TOKENS[line["task"]], output_tokens=output)
    try:
        request = PlanRequest(
            target=row.model, gpus=(GPUS[row.gpu],), traffic=traffic, rate=1.0, degrees=(devices,),
            engine_version="0.11", precision=Precision(weights=weights),
            expert_parallel=int(line["expert_parallel"]) > 1,
        )  # fmt: skip
        target = resolve_target(row.model)
        forward = forward_for(request, target, (GPUS[row.gpu], devices), ProfileStore())
        server = make_server(request, forward, None)
        work = cycle_work(forward, server.rules, traffic, running, Cycle())
    except RooftreeError as failure:
        return dataclasses.replace(row, refusal=failure.problem)
    return dataclasses.replace(row, server=server, work=work)


def fit_models(rows: Sequence[ServedRow]) -> list[str]:
    """The models whose rows are fitted to."""
    names = sorted(
        {row.model for row in rows}, key=lambda n: hashlib.sha256(n.encode()).hexdigest()
    )
    return names[::2]


def starved(row: ServedRow, rows: Sequence[ServedRow]) -> bool:
    """Whether the GPUs of a row drew so little that they waited for the host."""
    place = row.model, row.gpu, row.devices
    same = [
        other.watts for other in rows
        if (other.model, other.gpu, other.devices) == place and other.running <= 1.01 * row.running
    ]  # fmt: skip
    return row.watts < STARVED_SHARE * max(same)


def planned_s(rows: Sequence[ServedRow], changes: dict[str, float] | None = None) -> Array:
    """Planned seconds per token, with other values of some coefficients."""
    changed = [dataclasses.replace(row.server.overheads, **(changes or {})) for row in rows]
    values = np.array([[getattr(one, name) for name in COEFFICIENTS] for one in changed])
    works = work_columns([row.work for row in rows])
    return seconds_per_token(works, values, np.zeros(len(rows), bool))


def fit_host(rows: Sequence[ServedRow]) -> dict[str, float]:
    """The host's seconds by robust least squares of log errors."""
    measured_s, units = np.array([row.tpot_s for row in rows]), np.array([*FITTED.values()])

    def named(x: Array) -> dict[str, float]:
        return dict(zip(FITTED, (x * units).tolist(), strict=True))

    def residuals(x: Array) -> Array:
        errors = np.log(planned_s(rows, named(x)) / measured_s)
        return OUTLIER * np.asarray(np.arcsinh(errors / OUTLIER))

    return named(least_squares(residuals, np.ones(len(FITTED)), bounds=(0, np.inf)).x)


def fit_power(rows: Sequence[ServedRow]) -> dict[str, float]:
    """A line through the logarithms of power over its limit and of the peak rate's share."""
    planned = np.array([planned_w(row, s) for row, s in zip(rows, planned_s(rows), strict=True)])
    limits_w = np.array([row.devices * _limit_w(row) for row in rows])
    rate_log = np.log(planned / limits_w / POWER_SHARE) / POWER_EXPONENT
    measured_log = np.log(np.array([row.watts for row in rows]) / limits_w)
    slope, start = np.polyfit(rate_log, measured_log, 1)
    return {"share": math.exp(start), "exponent": float(slope)}


def planned_w(row: ServedRow, seconds: float) -> float:
    """Planned watts of all GPUs of a row."""
    rows_per_s = row.running * (1 + PROMPT_TOKENS[row.task] / row.output_tokens) / seconds
    return row.devices * _limit_w(row) * row.server.forward.power_share(rows_per_s)


def _limit_w(row: ServedRow) -> float:
    return row.server.forward.device.power_limit_w or math.nan


def score(rows: Sequence[ServedRow]) -> dict[str, Any]:
    """Errors of time and energy, and the shares inside their 80 % intervals."""
    if not rows:
        return {"rows": 0}
    seconds = planned_s(rows)
    watts = np.array([planned_w(row, s) for row, s in zip(rows, seconds, strict=True)])
    joules = watts * seconds / np.array([row.running for row in rows])
    log_s = np.log([row.tpot_s for row in rows]) - np.log(seconds)
    log_j = np.log([row.joules for row in rows]) - np.log(joules)
    log_w = np.log([row.watts for row in rows]) - np.log(watts)
    bars = [_errors(row) for row in rows]
    low, high = (INTERVAL * np.array(side) for side in zip(*bars, strict=True))
    result = {"rows": len(rows)}
    for name, log in (("tpot", log_s), ("joules", log_j)):
        error = np.expm1(-log)
        result[name] = {"mean": float(np.mean(np.abs(error))), "bias": float(np.mean(error))}
    result["tpot"]["inside"] = float(np.mean((log_s > -low) & (log_s < high)))
    wide = [row.server.forward.power_error for row in rows]
    for name, log in (("watts", log_w), ("joules", log_j)):
        inside = np.abs(log) < INTERVAL * np.array(wide)
        result.setdefault(name, {"mean": float(np.mean(np.abs(np.expm1(-log))))})
        result[name]["inside"] = float(np.mean(inside))
    return result


def _errors(row: ServedRow) -> tuple[float, float]:
    forward = row.server.forward
    error = relative_error(forward.origin, "vllm", None, 1.0, version="0.11")
    return error, slower_error(forward, row.server.rules, error)


def live(folder: Path) -> dict[str, Any]:
    """Planned over measured, less 1, of the live servers whose GPU has a profile."""
    result: dict[str, Any] = {}
    for gpu, (name, most) in LIVE.items():
        text = (folder / f"{name}__requests.jsonl").read_text(encoding="utf-8")
        lines = sorted((json.loads(t) for t in text.splitlines()), key=lambda r: r["arrival_time"])
        first, last, queued, arrival = (
            np.array([line[key] for line in lines])
            for key in ("first_token_ts", "last_token_ts", "queued_ts", "arrival_time")
        )
        prompt, output = (
            np.array([r[key] for r in lines]) for key in ("input_toks", "output_toks")
        )
        trace = Trace(arrival_s=arrival - arrival[0], prompt_tokens=prompt, output_tokens=output)
        request = PlanRequest(
            target=LIVE_TARGET, gpus=(gpu,), traffic=trace.means, rate=trace.rate_per_s,
            engine_version="0.19", servers=1, most_running=most, step_tokens=2048,
        )  # fmt: skip
        try:
            forward = forward_for(request, resolve_target(LIVE_TARGET), (gpu, 1), ProfileStore())
        except RooftreeError as failure:
            result[name] = {"refusal": failure.problem}
            continue
        server = make_server(request, forward, None)
        plan = replay(server, trace, most)
        measured = {
            "tpot": float(np.mean((last - first) / np.maximum(output - 1, 1))),
            "ttft": float(np.mean(first - queued)),
            "makespan": float(last.max() - queued.min()),
        }
        first_s = plan.ttft_s.mean() - server.overheads.front_s  # from the engine's queue on
        times_s = map(float, (np.nanmean(plan.tpot_s), first_s, plan.last_s.max()))
        result[name] = {
            key: planned / measured[key] - 1 for key, planned in zip(measured, times_s, strict=True)
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fit", action="store_true", help="fit host and power instead")
    options = parser.parse_args()
    rows = read_rows(options.folder / "steady_state_itl.csv")
    planned = [row for row in rows if row.server is not None]
    calm = [row for row in planned if not starved(row, rows)]
    fitted = fit_models(rows)
    if options.fit:
        own = [row for row in calm if row.model in fitted]
        write_overheads({"vllm@0.11": fit_host(own)})
        print(fit_power(own))
        return
    result: dict[str, Any] = {"environment": environment("cpu"), "rows": len(rows)}
    result["planned"], result["fitted_models"] = len(planned), fitted
    refusals = {(row.model, row.gpu, row.devices): row.refusal for row in rows if row.refusal}
    result["refused"] = [" ".join(map(str, key)) + f": {why}" for key, why in refusals.items()]
    for gpu in GPUS:
        for name, chosen in (("planned", planned), ("calm", calm)):
            here = [row for row in chosen if row.gpu == gpu]
            result[f"{gpu} {name}"] = score(here) | {
                "fit": score([row for row in here if row.model in fitted]),
                "test": score([row for row in here if row.model not in fitted]),
            }
    result["live"] = live(options.folder)
    print(json.dumps(result, indent=1))
    store("served_rows", result)


if __name__ == "__main__":
    main()
