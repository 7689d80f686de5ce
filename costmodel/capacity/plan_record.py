"""A plan as plain values: what `--format json` prints and `--format csv` takes its rows from."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from costmodel.capacity.operating import OperatingPoint
    from costmodel.capacity.percentiles import Simulated
    from costmodel.capacity.planner import Option, Plan

FORMAT_VERSION = 1


def plan_record(plan: Plan) -> dict[str, Any]:
    """Every field of the plan; seconds, bytes and watts in the names."""
    request = plan.request
    acceptance = plan.acceptance
    return {
        "format_version": FORMAT_VERSION,
        "request": {
            "target": request.target,
            "gpus": list(request.gpus),
            "tensor_parallel": list(request.degrees),
            "prompt_tokens": request.traffic.prompt_tokens,
            "output_tokens": request.traffic.output_tokens,
            "requests_per_s": request.rate,
            "goals": dataclasses.asdict(request.goals),
            "policy": request.policy.kind,
            "fixed_nodes": request.policy.nodes,
            "engine": request.engine,
            "precision": dataclasses.asdict(request.precision),
            "utilisation": request.utilisation,
            "most_running": request.most_running,
            "prices_per_hour": dict(request.prices),
        },
        "simulation": _simulation(plan),
        "acceptance": acceptance
        and {"label": acceptance.label, "kind": acceptance.kind, "spread": acceptance.spread},
        "options": [_option(option) for option in plan.options],
        "notes": list(plan.notes),
    }


def flat_rows(plan: Plan) -> list[dict[str, Any]]:
    """One row of plain values an option, all with the same keys."""
    simulated = {(found.gpu, found.tensor_parallel): found for found in plan.simulated}
    return [
        _flat(option) | _flat_simulated(simulated.get((option.gpu, option.tensor_parallel)))
        for option in plan.options
    ]


def _simulation(plan: Plan) -> dict[str, Any] | None:
    """What was simulated, and each GPU's best option under it; None without a simulation."""
    sampling = plan.request.sampling
    if sampling is None:
        return None
    return {
        "requests": sampling.count,
        "seed": sampling.seed,
        "trace": sampling.trace is not None,
        "length_variation": None if sampling.trace is not None else sampling.variation,
        "options": [dataclasses.asdict(found) for found in plan.simulated],
    }


def _flat_simulated(found: Simulated | None) -> dict[str, Any]:
    """The columns of a simulation, empty where there was none."""
    fleet = found.planned if found else None
    row: dict[str, Any] = {
        "simulated_gpus": fleet.gpus if fleet else None,
        "simulated_utilisation": fleet.utilisation if fleet else None,
        "simulated_running": fleet.running if fleet else None,
        "simulated_overloaded": fleet.overloaded if fleet else None,
    }
    for metric in ("waiting", "ttft", "tpot"):
        spread = getattr(fleet, metric) if fleet else None
        for percent in ("p50", "p95", "p99"):
            row[f"{metric}_{percent}_s"] = getattr(spread, percent).value if spread else None
    enough = found.enough if found else None
    return row | {
        "goals_missed": " ".join(fleet.missed) if fleet else None,
        "gpus_that_hold_all_goals": enough.gpus if enough else None,
        "simulation_problem": found.problem or None if found else None,
    }


def _option(option: Option) -> dict[str, Any]:
    sizing = option.sizing
    return {
        "gpu": option.gpu,
        "device": option.device,
        "tensor_parallel": option.tensor_parallel,
        "origin": option.origin and dataclasses.asdict(option.origin),
        "drafter": option.drafter,
        "relative_error": option.error,
        "feasible": sizing is not None,
        "problem": option.problem or None,
        "nearest": option.nearest or None,
        "sizing": sizing and dataclasses.asdict(sizing),
        "by_concurrency": [_point(point) for point in option.points],
    }


def _point(point: OperatingPoint) -> dict[str, Any]:
    return dataclasses.asdict(point)


def _flat(option: Option) -> dict[str, Any]:
    sizing = option.sizing
    cost = sizing.cost_per_million if sizing else None
    return {
        "gpu": option.gpu,
        "tensor_parallel": option.tensor_parallel,
        "origin": option.origin.kind if option.origin else None,
        "gpus": sizing.gpus.value if sizing else None,
        "gpus_low": sizing.gpus.low if sizing else None,
        "gpus_high": sizing.gpus.high if sizing else None,
        "running_at_most": sizing.at_most.running if sizing else None,
        "requests_per_s_at_most": sizing.at_most.requests_per_s if sizing else None,
        "running": sizing.at_load.running if sizing else None,
        "shape": sizing.at_load.shape if sizing else None,
        "nodes": sizing.at_load.nodes if sizing else None,
        "committed": sizing.at_load.committed if sizing else None,
        "tpot_s": sizing.tpot_s.value if sizing else None,
        "tpot_low_s": sizing.tpot_s.low if sizing else None,
        "tpot_high_s": sizing.tpot_s.high if sizing else None,
        "ttft_s": sizing.ttft_s.value if sizing else None,
        "ttft_low_s": sizing.ttft_s.low if sizing else None,
        "ttft_high_s": sizing.ttft_s.high if sizing else None,
        "cost_per_hour": sizing.cost_per_hour.value if sizing and sizing.cost_per_hour else None,
        "cost_per_million_tokens": cost.value if cost else None,
        "cost_per_million_tokens_low": cost.low if cost else None,
        "cost_per_million_tokens_high": cost.high if cost else None,
        "watts_at_most": sizing.watts if sizing else None,
        "joules_per_token_at_most": sizing.joules_per_token if sizing else None,
        "problem": option.problem or None,
        "nearest": option.nearest or None,
    }
