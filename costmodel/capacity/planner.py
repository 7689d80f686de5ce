"""Which GPUs, how many, what tree size, at what cost: a search over devices and degrees."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from costmodel.capacity.acceptance_data import Acceptance, find_acceptance
from costmodel.capacity.arrivals import check_window
from costmodel.capacity.drafting import find_drafter
from costmodel.capacity.engines import engine_rules
from costmodel.capacity.goals import Goals
from costmodel.capacity.lookup import Target, find_card, find_plan_target, find_steps, profile_steps
from costmodel.capacity.operating import OperatingPoint, Policy, Server, Traffic
from costmodel.capacity.overheads import Overheads
from costmodel.capacity.percentiles import Choice, Simulated, simulate_option
from costmodel.capacity.plan_notes import plan_notes
from costmodel.capacity.request import DEGREES, PlanRequest
from costmodel.capacity.shipped import engine_overheads
from costmodel.capacity.simulate import find_simpy
from costmodel.capacity.sizing import SERVER_ERROR, Group, Sizing, choose, nearest, size
from costmodel.capacity.steps import Origin, StepModel
from costmodel.errors import InputError, RooftreeError
from costmodel.registry import ProfileStore

__all__ = ["Goals", "Option", "Plan", "PlanRequest", "Policy", "Traffic", "plan"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One GPU and degree: its sizing, or why there is none and the nearest that there is."""

    gpu: str
    device: str
    tensor_parallel: int
    origin: Origin | None = None
    drafter: str | None = None
    error: float | None = None
    points: tuple[OperatingPoint, ...] = ()
    sizing: Sizing | None = None
    problem: str = ""
    nearest: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All options, the best first; those without a sizing last.

    `simulated`: each GPU's best option, where the request has a sampling.
    """

    request: PlanRequest
    options: tuple[Option, ...]
    acceptance: Acceptance | None
    notes: tuple[str, ...]
    simulated: tuple[Simulated, ...] = ()

    @property
    def best(self) -> Option | None:
        """The cheapest, or the one with the fewest GPUs where there are no prices."""
        return self.options[0] if self.options and self.options[0].sizing else None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, stable across versions."""
        from costmodel.capacity.plan_record import plan_record

        return plan_record(self)


def plan(request: PlanRequest, store: ProfileStore | None = None) -> Plan:
    """Every option's sizing, the best first.

    An option that cannot be is kept with its reason. Raises InputError for a question that
    contradicts itself, and where no option can even be looked at.
    """
    profiles = store or ProfileStore()
    target = find_plan_target(request.target)
    _check_length(request, target)
    if request.sampling is not None:
        find_simpy()  # before anything is planned
        check_window(request.sampling, target.architecture.name, target.positions)
    for gpu in request.gpus:
        if not _is_file(gpu):
            find_card(gpu, profiles)  # a wrong name is refused before anything is planned
    acceptance = None
    if request.acceptance is not None:
        acceptance = find_acceptance(request.acceptance, request.target, request.temperature)
        if request.policy.nodes is not None:
            acceptance.committed("tree", request.policy.nodes)  # refuses what is not known
    options = [
        _option(request, target, acceptance, (gpu, degree), profiles)
        for gpu in request.gpus
        for degree in request.degrees
    ]
    options.sort(key=_rank)
    unseen = [option for option in options if option.origin is None]
    if len(unseen) == len(options) and len({option.problem for option in unseen}) == 1:
        raise InputError(unseen[0].problem, hint=unseen[0].nearest)
    return Plan(
        request=request,
        options=tuple(options),
        acceptance=acceptance,
        notes=tuple(plan_notes(request, options)),
        simulated=tuple(_simulated(request, target, acceptance, options, profiles)),
    )


def _simulated(
    request: PlanRequest,
    target: Target,
    acceptance: Acceptance | None,
    options: Sequence[Option],
    store: ProfileStore,
) -> Iterator[Simulated]:
    """Each GPU's best option, simulated."""
    seen = set()
    for option in options:
        if request.sampling is None or option.sizing is None or option.gpu in seen:
            continue
        seen.add(option.gpu)
        steps = steps_for(request, target, (option.gpu, option.tensor_parallel), store)
        choice = Choice(
            gpu=option.gpu,
            server=make_server(request, steps, acceptance),
            points=option.points,
            gpus=round(option.sizing.gpus.value),
            error=option.error or 0.0,
            positions=target.positions,
        )
        try:
            yield simulate_option(request, request.sampling, choice)
        except InputError as failure:
            yield Simulated(
                gpu=option.gpu, tensor_parallel=option.tensor_parallel, problem=str(failure)
            )


def make_server(request: PlanRequest, steps: StepModel, acceptance: Acceptance | None) -> Server:
    """The server that a request asks for, on these step times. Raises InputError."""
    speculates = acceptance is not None and request.policy.kind != "plain"
    return Server(
        forward=steps,
        rules=engine_rules(request.engine),
        overheads=server_overheads(request.engine, steps.origin),
        policy=request.policy,
        acceptance=acceptance,
        drafter=find_drafter(steps, request.drafter) if speculates else None,
    )


def server_overheads(engine: str, origin: Origin) -> Overheads:
    """What the engine adds: nothing to a whole runtime's own times, no gaps twice."""
    if engine == "rooftree" and origin.whole_runtime:
        return Overheads()
    overheads = engine_overheads(engine)
    if origin.whole_runtime:
        return dataclasses.replace(overheads, layer_s=0.0, prompt_layer_s=0.0)
    return overheads


def relative_error(
    origin: Origin, engine: str, acceptance: Acceptance | None, committed: float
) -> float:
    """Expected relative error of a time per token: independent parts added in squares.

    The profile's own, the server model's (none where the whole runtime was measured and runs as
    it is), and the acceptance's.
    """
    server = 0.0 if engine == "rooftree" and origin.whole_runtime else SERVER_ERROR
    spread = acceptance.relative_error(committed) if acceptance else 0.0
    return math.sqrt(origin.error**2 + server**2 + spread**2)


def steps_for(
    request: PlanRequest, target: Target, choice: tuple[str, int], store: ProfileStore
) -> StepModel:
    """The step times of one (GPU or profile, degree). Raises what the lookup raises."""
    gpu, degree = choice
    if _is_file(gpu):
        steps = profile_steps(Path(gpu), target)
        if steps.tensor_parallel != degree:
            raise InputError(f"is a profile of tp {steps.tensor_parallel}, not {degree}")
        return steps
    return find_steps(
        find_card(gpu, store),
        target,
        store,
        tensor_parallel=degree,
        precision=request.precision,
        engine=request.engine,
    )


def _is_file(gpu: str) -> bool:
    return gpu.endswith((".yaml", ".yml"))


def _option(
    request: PlanRequest,
    target: Target,
    acceptance: Acceptance | None,
    choice: tuple[str, int],
    store: ProfileStore,
) -> Option:
    option = Option(gpu=choice[0], device=choice[0], tensor_parallel=choice[1])
    try:
        steps = steps_for(request, target, choice, store)
        server = make_server(request, steps, acceptance)
        option = dataclasses.replace(
            option,
            device=steps.card.name,
            origin=steps.origin,
            drafter=server.drafter.label if server.drafter else None,
        )
        points = server.points(request.traffic, request.most_running)
        if not points:
            raise no_room(request.traffic, server)
    except RooftreeError as failure:
        return dataclasses.replace(option, problem=failure.problem, nearest=failure.hint)
    return _sized(request, option, points, (steps, acceptance))


def _sized(
    request: PlanRequest,
    option: Option,
    points: list[OperatingPoint],
    data: tuple[StepModel, Acceptance | None],
) -> Option:
    option = dataclasses.replace(option, points=tuple(points))
    steps, acceptance = data
    at_most = choose(points, request.goals)
    if at_most is None:
        near = nearest(points, request.goals)
        return dataclasses.replace(
            option,
            problem="the goals are not reached at any concurrency",
            nearest=f"tpot {near.tpot_s * 1e3:.1f} ms and ttft {near.ttft_s * 1e3:.0f} ms, with"
            f" {near.running} at once",
        )
    error = relative_error(steps.origin, request.engine, acceptance, at_most.committed)
    group = Group(gpu=option.gpu, devices=option.tensor_parallel, power_w=steps.card.power_w)
    sizing = size(request, group, points, error)
    return dataclasses.replace(option, error=error, sizing=sizing)


def no_room(traffic: Traffic, server: Server) -> InputError:
    """That not one request fits, and the smallest degree at which one does."""
    whole = traffic.prompt_tokens + traffic.output_tokens
    a, degree = server.forward.architecture, server.forward.tensor_parallel
    fitting = next((n for n in DEGREES if n > degree and server.room(n) >= whole), None)
    room = server.room(degree)
    problem = f"does not fit: a request needs {whole:.0f} cached tokens"
    problem += f", there is room for {room:.0f}" if room > 0 else ", the weights leave no room"
    if fitting is None:
        return InputError(problem, hint=f"a smaller model or precision than {a.name} in bfloat16")
    return InputError(problem, hint=f"--tp {fitting}, or a smaller precision")


def _check_length(request: PlanRequest, target: Target) -> None:
    whole = request.traffic.prompt_tokens + request.traffic.output_tokens
    if target.positions is not None and whole > target.positions:
        raise InputError(
            f"prompt and answer are {whole:.0f} tokens, {target.architecture.name} holds"
            f" {target.positions}",
            hint=f"Plan for at most {target.positions} tokens together",
        )


def _rank(option: Option) -> tuple[int, float, float]:
    if option.sizing is None:
        return (1, 0.0, 0.0)
    cost = option.sizing.cost_per_hour
    gpus = option.sizing.gpus.value
    return (0, cost.value if cost else math.inf, gpus)
