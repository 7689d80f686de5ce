"""The plan: sized options, simulated fleets, notes, and both as plain values."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from costmodel.planning.acceptance import Acceptance, Shape
from costmodel.planning.accuracy import DRAFTING_ERROR, server_error
from costmodel.planning.drafting import DraftCost
from costmodel.planning.engines import VERSIONS, planned_version
from costmodel.planning.forwards import Origin
from costmodel.planning.request import CURRENCY, PlanRequest
from costmodel.planning.servers import DraftComparison, Interval, OperatingPoint, Server, Sizing


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanOption:
    """One GPU and tensor-parallel degree: its sizing, or the problem and the nearest that works.

    `server` is one of its servers, `error` the expected relative error of all times, `slower` that
    of longer ones; `points` are
    the best ones by requests at once, `choices` the same with the plain step, chain and tree, and
    `with_trees` those of this project's decoder, where the engine verifies no trees. `doubts` say
    why the acceptance may not hold. `unsplit`: the engine splits no keys of several rows here.
    `draft_bytes`: of a GPU's memory, the drafter's weights, and its cache a token.
    """

    gpu: str
    device: str
    tensor_parallel: int
    origin: Origin | None = None
    drafter: DraftCost | None = None
    draft_bytes: tuple[float, float] = (0.0, 0.0)
    unsplit: bool = False
    doubts: tuple[str, ...] = ()
    error: float | None = None
    slower: float | None = None
    points: tuple[OperatingPoint, ...] = ()
    server: Server | None = None
    choices: tuple[DraftComparison, ...] = ()
    with_trees: tuple[DraftComparison, ...] = ()
    sizing: Sizing | None = None
    problem: str = ""
    nearest: str = ""

    def describe_problem(self) -> str:
        return f"{self.gpu} tp {self.tensor_parallel}: {self.problem}; nearest: {self.nearest}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShapeRange:
    """Requests at once, first to last, for which one shape is the best."""

    shape: Shape
    first: int
    last: int


def shape_ranges(choices: Sequence[DraftComparison]) -> list[ShapeRange]:
    """Where plain steps, chains and trees cross over; only planned numbers of requests are known.

    Each range ends at the largest planned number at which its shape is still the best.
    """
    groups = itertools.groupby(choices, key=lambda choice: choice.best.shape)
    spans = [(shape, [choice.running for choice in group]) for shape, group in groups]
    return [ShapeRange(shape=shape, first=at[0], last=at[-1]) for shape, at in spans]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpread:
    """Mean and percentiles in seconds with 80 % intervals; `high` is None for a growing queue."""

    mean: Interval
    p50: Interval
    p90: Interval
    p95: Interval
    p99: Interval


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """A number of GPUs under the simulated requests.

    `waiting` is from arrival to admission; `tpot` is None where every answer has one token.
    `utilisation` is the share of time in which a server runs a step; `running` is the mean number
    of requests at once on a server, or on each of its data-parallel groups. `makespan_s` is from
    the first arrival to the last token. `overloaded`: the queue grows. `missed`: names of goals.
    """

    gpus: int
    waiting: TimeSpread
    ttft: TimeSpread
    tpot: TimeSpread | None
    utilisation: float
    running: float
    makespan_s: float
    overloaded: bool
    missed: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedOption:
    """A simulated option: the fleet that the means need, and the smallest that holds all goals.

    `enough` is `planned` where that holds all goals, and None where no fleet of up to
    `tried_gpus` GPUs does; `nearest` is then the largest one. `cost_per_hour` is that of `enough`.
    `problem`: the reason why nothing could be simulated.
    """

    gpu: str
    tensor_parallel: int
    planned: Fleet | None = None
    enough: Fleet | None = None
    tried_gpus: int = 0
    nearest: Fleet | None = None
    cost_per_hour: float | None = None
    problem: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All options, the best first and those without a sizing last.

    notes        remarks on this plan
    assumptions  remarks that hold for every plan of its kind
    simulated    the best option of each GPU, where the request asks for a simulation
    published    without acceptance: speed-ups at the best option's load, by the published data sets
                 of the least and of the most acceptance, which label them
    """

    request: PlanRequest
    options: tuple[PlanOption, ...]
    acceptance: Acceptance | None
    notes: tuple[str, ...]
    assumptions: tuple[str, ...] = ()
    simulated: tuple[SimulatedOption, ...] = ()
    published: tuple[tuple[str, float], ...] = ()

    @property
    def best(self) -> PlanOption | None:
        """The cheapest option, or that of the fewest GPUs without prices; None if none is sized."""
        return self.options[0] if self.options and self.options[0].sizing else None

    @property
    def rivals(self) -> tuple[PlanOption, ...]:
        """Options whose interval of cost, else of GPUs, overlaps that of the best one."""
        best = self.best.sizing if self.best else None
        if best is None:
            return ()
        quantity = "gpus" if best.cost_per_hour is None else "cost_per_hour"
        first: Interval = getattr(best, quantity)
        others: list[tuple[PlanOption, Interval | None]] = [
            (option, getattr(option.sizing, quantity, None)) for option in self.options[1:]
        ]
        return tuple(
            option
            for option, other in others
            if other is not None and (first.high is None or other.low <= first.high)
        )

    def queues(self, option: PlanOption) -> bool:
        """Whether the queue grows, or requests wait longer than the plan's time to the first token.

        Such an option has no time to the first token, in the tables and in JSON.
        """
        sizing, key = option.sizing, (option.gpu, option.tensor_parallel)
        fleets = [one.planned for one in self.simulated if (one.gpu, one.tensor_parallel) == key]
        return sizing is not None and (
            sizing.load > 1
            or any(
                fleet.overloaded or fleet.waiting.mean.value > sizing.ttft_s.value
                for fleet in fleets
                if fleet is not None
            )
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, stable across versions; units are in the names."""
        request, acceptance = self.request, self.acceptance
        simulation = request.simulation
        return {
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
                "drafter": request.drafter,
                "precision": dataclasses.asdict(request.precision),
                "engine_version": request.engine_version or None,
                "step_tokens": request.step_tokens,
                "prefix_hits": request.prefix_hits,
                "utilisation": None if request.servers else request.utilisation,
                "servers": request.servers,
                "most_running": request.most_running,
                "prices_per_hour": dict(request.prices),
                "currency": CURRENCY,
            },
            "simulation": simulation
            and {
                "requests": simulation.count,
                "seed": simulation.seed,
                "trace": simulation.trace is not None,
                "length_variation": None if simulation.trace is not None else simulation.variation,
                "options": [_simulated_record(option) for option in self.simulated],
            },
            "acceptance": acceptance
            and {
                "label": acceptance.label,
                "kind": acceptance.kind,
                "spread": acceptance.spread,
                "measured": dataclasses.asdict(acceptance.measured),
            },
            "published_speedups": dict(self.published),
            "options": [_option_record(one, self.queues(one)) for one in self.options],
            "rivals": [[option.gpu, option.tensor_parallel] for option in self.rivals],
            "notes": list(self.notes),
            "assumptions": list(self.assumptions),
        }


def plan_remarks(
    request: PlanRequest, options: Sequence[PlanOption]
) -> tuple[list[str], list[str]]:
    """Remarks on this plan, and those that hold for every plan of its kind, one line each."""
    notes = []
    unpriced = [gpu for gpu in request.gpus if gpu not in request.prices]
    if request.prices and unpriced:
        notes.append(f"no price for {', '.join(unpriced)}: ranked behind those that have one")
    if not request.prices:
        notes.append("no prices: ranked by the number of GPUs; --price GPU=2.5 is per hour")
    kinds = sorted({option.origin.kind for option in options if option.origin})
    if "imported" in kinds:
        notes.append(
            "times are imported from another tool's file; `rooftree profiles show` says what is not"
            " in them"
        )
    if borrowed := [kind for kind in kinds if kind not in ("measured", "imported")]:
        notes.append(
            f"times are {' or '.join(borrowed)}, not measured on the GPU;"
            " `rooftree calibrate` there narrows the intervals"
        )
    planned, asked = planned_version(request.engine, request.engine_version), request.engine_version
    if planned is not None and planned.planned_as != asked:
        older = VERSIONS[request.engine][0].planned_as
        others = f"; --engine {request.engine}@{older} plans older ones" if not asked else ""
        does = "overlaps its host's work" if planned.overlaps_host else "prepares steps in between"
        notes.append(
            f"{request.engine} {asked or 'of today'} is planned as {planned.planned_as},"
            f" which {does}{others}"
        )
    experts = {one.gpu: one.origin.experts for one in options if one.origin and one.origin.experts}
    notes += [
        f"{gpu}: no sound table times experts of these weights; those of {form} are taken"
        for gpu, form in experts.items()
    ]
    waiting = [option for option in options if option.slower != option.error]
    if waiting:
        notes.append(
            "intervals reach further up where a GPU may wait for its host, as one in four of the"
            " published B200 servers did, for PCIe or other ranks, or stalls on experts (Mixtral)"
        )
    for option in options:
        if option.sizing and option.sizing.load > 1:
            notes.append(
                f"{option.gpu} tp {option.tensor_parallel}: overloaded, the rate is"
                f" {option.sizing.load:.2f} times what the servers complete; the queue grows"
            )
    unsplit = dict.fromkeys(option.gpu for option in options if option.unsplit and option.choices)
    if request.acceptance is not None and unsplit:
        notes.append(
            f"chains on {', '.join(unsplit)}: vLLM's FlashAttention 2 splits no keys of several"
            " rows over processors, which long contexts pay for (docs/method.md)"
        )
    notes += dict.fromkeys(doubt for option in options for doubt in option.doubts)
    assumptions = []
    if any(option.sizing for option in options):
        assumptions.append(
            "intervals are of 80 %: errors of the profile, of the server model"
            f" ({server_error(request.engine, request.engine_version):.1%}, on published servers)"
            " and of acceptance, all independent"
        )
    if request.simulation is not None and not request.replays:
        assumptions.append(
            "percentiles leave out the first and last tenth of the requests; their intervals are"
            " those of the whole simulation with all times shorter and longer"
        )
    if any(choice.tree for option in options for choice in (*option.choices, *option.with_trees)):
        assumptions.append(
            "trees may lose to chains of the same drafter: 0.61 to 1.01 times in a port to vLLM"
            " (two RTX A6000), 0.72 with a hybrid on Jetson Thor; the engine's host work, a strong"
            " drafter and kernels of hybrids decide. TensorRT-Edge-LLM and JetSpec's engine verify"
            " trees too, and have no times here"
        )
    if request.acceptance is not None:
        assumptions.append(
            "drafting for many requests at once was not checked against measured servers: its"
            f" intervals hold {DRAFTING_ERROR:.0%} more"
        )
    return notes, assumptions


def _simulated_record(option: SimulatedOption) -> dict[str, Any]:
    """The option; an overloaded fleet has no waiting and no time to the first token."""
    record = dataclasses.asdict(option)
    for name in ("planned", "enough", "nearest"):
        if record[name] and record[name]["overloaded"]:
            record[name]["waiting"] = record[name]["ttft"] = None
    return record


def _option_record(option: PlanOption, queues: bool) -> dict[str, Any]:
    sizing = option.sizing and dataclasses.asdict(option.sizing)
    if sizing and queues:
        sizing["ttft_s"] = sizing["at_load"]["ttft_s"] = None
    return {
        "gpu": option.gpu,
        "device": option.device,
        "tensor_parallel": option.tensor_parallel,
        "origin": option.origin and dataclasses.asdict(option.origin),
        "drafter": option.drafter and option.drafter.name,
        "drafter_cost": option.drafter and option.drafter.label,
        "drafter_weight_bytes": option.draft_bytes[0],
        "drafter_bytes_per_token": option.draft_bytes[1],
        "doubts": list(option.doubts),
        "relative_error": option.error,
        "relative_error_slower": option.slower,
        "feasible": sizing is not None,
        "problem": option.problem or None,
        "nearest": option.nearest or None,
        "queues": queues,
        "sizing": sizing,
        "by_concurrency": [dataclasses.asdict(point) for point in option.points],
        "pays": _pays_record(option.choices),
        "pays_with_trees": _pays_record(option.with_trees),
    }


def _pays_record(choices: Sequence[DraftComparison]) -> dict[str, Any] | None:
    """Speed-ups over plain decoding by requests at once, and where the shapes cross over."""
    if not choices:
        return None
    return {
        "by_concurrency": [
            {
                "running": choice.running,
                "plain_tpot_s": choice.plain.tpot_s,
                "chain_nodes": choice.chain and choice.chain.nodes,
                "chain_speedup": choice.chain and choice.speedup(choice.chain),
                "tree_nodes": choice.tree and choice.tree.nodes,
                "tree_speedup": choice.tree and choice.speedup(choice.tree),
                "best": choice.best.shape,
                "best_speedup": choice.speedup(choice.best),
            }
            for choice in choices
        ],
        "best": [dataclasses.asdict(one) for one in shape_ranges(choices)],
    }
