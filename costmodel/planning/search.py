"""Search for the best plan over GPUs and tensor-parallel degrees."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from costmodel.catalog import TargetEntry, find_device, resolve_target
from costmodel.errors import InputError, RooftreeError
from costmodel.planning.acceptance import Acceptance, Shape, find_acceptance, published_extremes
from costmodel.planning.accuracy import relative_error, slower_error
from costmodel.planning.batching import Overheads, engine_overheads
from costmodel.planning.drafting import acceptance_for, find_drafter
from costmodel.planning.engines import engine_rules
from costmodel.planning.forwards import Origin, TargetForward
from costmodel.planning.request import DEGREES, PlanRequest
from costmodel.planning.result import (
    Plan,
    PlanOption,
    SimulatedOption,
    plan_assumptions,
    plan_notes,
)
from costmodel.planning.servers import Group, Server, choose, nearest, size
from costmodel.planning.simulation.engine import import_simpy
from costmodel.planning.simulation.percentiles import SimulatedChoice, simulate_option
from costmodel.planning.sources import forward_for, is_file
from costmodel.planning.traffic import Traffic
from costmodel.profile.profile import Profile
from costmodel.profile.store import ProfileStore


def plan(request: PlanRequest, store: ProfileStore | None = None) -> Plan:
    """Size every GPU and degree of the request, and rank them.

    `store` is where profiles are looked up (None: the user's directory, then shipped ones). An
    option that cannot be planned is returned with its problem. Raises InputError for a request
    that contradicts itself, and where every option lacks its times for the same reason.
    """
    profiles = store or ProfileStore()
    target = resolve_target(request.target, hub=True)
    request = dataclasses.replace(request, precision=request.precision.of(target))
    acceptance = _checked_inputs(request, target, profiles)
    options = [
        _option(request, target, acceptance, (gpu, degree), profiles)
        for gpu in request.gpus
        for degree in request.degrees
    ]
    options.sort(key=_rank)
    without_times = all(option.origin is None for option in options)
    if without_times and len({option.problem for option in options}) == 1:
        raise InputError(options[0].problem, hint=options[0].nearest)
    return Plan(
        request=request,
        options=tuple(options),
        acceptance=acceptance,
        notes=tuple(plan_notes(request, options)),
        assumptions=tuple(plan_assumptions(request, options)),
        simulated=tuple(_simulated(request, target, acceptance, options, profiles)),
        published=tuple(_published(request, target, options[0], profiles)),
    )


def plan_profile(request: PlanRequest, profile: Profile, running: int) -> Plan:
    """The plan of one profile alone, loaded with `running` requests at once.

    The request's target and GPU are labels; its rate is not used. Raises InputError.
    """
    acceptance = _acceptance(request)
    option = PlanOption(
        gpu=request.gpus[0],
        device=profile.device.name,
        tensor_parallel=profile.runtime.tensor_parallel,
    )
    forward = TargetForward(profile, request.engine)
    option = _planned(request, option, forward, acceptance)
    if not option.points:
        raise InputError(option.problem, hint=option.nearest)
    loaded = next((p for p in option.points if p.running >= running), option.points[-1])
    request = dataclasses.replace(request, rate=loaded.requests_per_s, utilisation=1.0)
    option = _sized(request, option, make_server(request, forward, acceptance))
    return Plan(request=request, options=(option,), acceptance=acceptance, notes=())


def make_server(
    request: PlanRequest, forward: TargetForward, acceptance: Acceptance | None
) -> Server:
    """The server of a request on these forward times. Raises InputError."""
    device, drafter = forward.device, None
    rules = engine_rules(
        request.engine, request.engine_version, step_tokens=request.step_tokens,
        prefix_hits=request.prefix_hits, device=(device.name, device.memory_bytes),
    )  # fmt: skip
    if acceptance is not None:
        drafter = find_drafter(forward, request.drafter, acceptance.measured)
        trees = rules.verifies_trees and request.policy.kind != "chain"
        whole, groups = forward.architecture, request.data_parallel
        if groups > 1:  # the forward has one group's share of the experts
            whole = dataclasses.replace(whole, experts=groups * whole.experts)
        acceptance = acceptance_for(acceptance, (request.target, whole), drafter, trees=trees)
    return Server(
        forward=forward,
        rules=rules,
        overheads=server_overheads(request.engine, forward.origin, request.engine_version),
        policy=request.policy,
        acceptance=acceptance,
        drafter=drafter,
    )


def server_overheads(engine: str, origin: Origin, version: str = "") -> Overheads:
    """Overheads of the engine, without those that the forward times already include."""
    if engine == origin.engine and origin.whole_runtime:
        return Overheads(step_s=origin.host_s)
    overheads = engine_overheads(engine, version)
    if engine == "rooftree":  # acceptance is timed in its profiles, and sorts nothing
        overheads = dataclasses.replace(overheads, logits=0.0)
    if origin.whole_runtime:
        return dataclasses.replace(overheads, layer_s=0.0, prompt_layer_s=0.0)
    return overheads


def _checked_inputs(
    request: PlanRequest, target: TargetEntry, store: ProfileStore
) -> Acceptance | None:
    """The acceptance data. Raises InputError for an input that cannot be used."""
    tokens = request.traffic.total_tokens
    if target.positions is not None and tokens > target.positions:
        raise InputError(
            f"prompt and answer are {tokens:.0f} tokens, {target.architecture.name} holds"
            f" {target.positions}",
            hint=f"Plan for at most {target.positions} tokens together",
        )
    if request.simulation is not None:
        import_simpy()
        request.simulation.check_window(target.architecture.name, target.positions)
    slugs, unknown = [], []
    for gpu in request.gpus:
        try:
            slugs.append(gpu if is_file(gpu) else find_device(gpu).slug)
        except InputError as failure:  # an option's problem, where there are others
            unknown.append(failure)
    if not slugs:
        raise unknown[0]
    if twice := next((slug for slug in slugs if slugs.count(slug) > 1), None):
        raise InputError(f"{twice} is named twice in --gpus", hint="Name each GPU once")
    return _acceptance(request)


def _acceptance(request: PlanRequest) -> Acceptance | None:
    if request.acceptance is None:
        return None
    acceptance = find_acceptance(request.acceptance, request.target, request.temperature)
    if request.policy.nodes is not None:
        shape: Shape = "chain" if request.policy.kind == "chain" else "tree"
        acceptance.committed(shape, request.policy.nodes)
    return acceptance


def _option(
    request: PlanRequest,
    target: TargetEntry,
    acceptance: Acceptance | None,
    choice: tuple[str, int],
    store: ProfileStore,
) -> PlanOption:
    option = PlanOption(gpu=choice[0], device=choice[0], tensor_parallel=choice[1])
    try:
        forward = forward_for(request, target, choice, store)
    except RooftreeError as failure:
        return dataclasses.replace(option, problem=failure.problem, nearest=failure.hint)
    option = _planned(request, option, forward, acceptance)
    if not option.choices or acceptance is None or request.policy.kind != "auto":
        return option
    if engine_rules(request.engine).verifies_trees:
        return option
    # The choices of this project's decoder, as the request's engine verifies no trees.
    decoder = dataclasses.replace(request, engine="rooftree", engine_version="")
    if request.engine == "vllm":  # whose operators time this decoder too
        forward = TargetForward(forward.profile, decoder.engine, forward.ranks)
    else:
        forward = forward_for(decoder, target, choice, store)
    server = make_server(decoder, forward, acceptance)
    trees = server.choices(request.traffic, request.most_running)
    return dataclasses.replace(option, with_trees=tuple(trees))


def _published(
    request: PlanRequest, target: TargetEntry, best: PlanOption, store: ProfileStore
) -> Iterator[tuple[str, float]]:
    """Speed-ups by published acceptance where the plan has none: its labels, the least first."""
    if request.acceptance or request.policy.kind != "auto" or best.sizing is None:
        return
    if request.drafter not in (None, "dflash"):
        return
    forward, at = forward_for(request, target, (best.gpu, best.tensor_parallel), store), best.sizing
    for dataset in published_extremes(request.target):
        acceptance = find_acceptance(dataset, request.target)
        server = make_server(request, forward, acceptance)
        drafting = server.best(request.traffic, at.at_load.running)
        yield acceptance.label, at.at_load.tpot_s / drafting.tpot_s


def _planned(
    request: PlanRequest, option: PlanOption, forward: TargetForward, acceptance: Acceptance | None
) -> PlanOption:
    """The option with its choices and sizing, or with the problem."""
    try:
        server = make_server(request, forward, acceptance)
        option = dataclasses.replace(
            option,
            device=forward.device.name,
            origin=forward.origin,
            unsplit=forward.unsplit,
            drafter=server.drafter,
        )
        drafter, a, degree = server.drafter, forward.architecture, forward.tensor_parallel
        if drafter is not None:
            held = drafter.weight_bytes(a) / degree, drafter.cache_bytes_per_token(a) / degree
            option = dataclasses.replace(option, draft_bytes=held)
        if server.acceptance is not None:
            # The largest step of the times that their fit misses is a doubt too.
            steps = forward.profile.calibration.warnings[:1]
            text = f"{option.gpu}, a draft's rows may be priced wrong"
            doubts = server.acceptance.doubts + tuple(f"{text}: {step}" for step in steps)
            option = dataclasses.replace(option, doubts=doubts)
        choices = server.choices(request.traffic, request.most_running)
        if not choices:
            raise _no_room(request.traffic, server)
    except RooftreeError as failure:
        return dataclasses.replace(option, problem=failure.problem, nearest=failure.hint)
    option = dataclasses.replace(
        option, choices=tuple(choices), points=tuple(choice.best for choice in choices)
    )
    return _sized(request, option, server)


def _sized(request: PlanRequest, option: PlanOption, server: Server) -> PlanOption:
    at_most = choose(option.points, request.goals)
    if at_most is None:
        near = nearest(option.points, request.goals)
        return dataclasses.replace(
            option,
            problem="the goals are not reached at any concurrency",
            nearest=f"tpot {near.tpot_s * 1e3:.1f} ms and ttft {near.ttft_s * 1e3:.0f} ms, with"
            f" {near.running} at once",
        )
    forward = server.forward
    error = relative_error(
        forward.origin,
        request.engine,
        server.acceptance,
        at_most.committed,
        version=request.engine_version,
        running=at_most.running,
    )
    slower = slower_error(forward, server.rules, error)
    power_w = forward.device.power_w
    group = Group(
        gpu=option.gpu,
        devices=option.tensor_parallel * request.data_parallel,
        power_w=power_w,
        power_error=forward.power_error,
        ranks=request.data_parallel,
    )
    sizing = size(request, group, option.points, error, slower)
    doubts = option.doubts
    if sizing is not None and server.drafter is not None:
        alone = dataclasses.replace(server, drafter=None, acceptance=None)
        plain = size(request, group, alone.points(request.traffic, request.most_running), error)
        if plain is not None and plain.gpus.value < sizing.gpus.value:
            doubts += (
                f"{option.gpu}: {plain.gpus.value:.0f} GPUs are enough without a drafter, whose"
                " weights and cache leave room for fewer requests",
            )
    return dataclasses.replace(option, error=error, slower=slower, sizing=sizing, doubts=doubts)


def _no_room(traffic: Traffic, server: Server) -> InputError:
    """The error that not one request fits, with the smallest degree at which one does."""
    tokens = server.held_tokens(traffic.total_tokens)
    a, degree = server.forward.architecture, server.forward.tensor_parallel
    fitting = next((n for n in DEGREES if n > degree and server.cache_tokens(n) >= tokens), None)
    room = server.cache_tokens(degree)
    problem = f"does not fit: a request needs {tokens:.0f} cached tokens"
    problem += f", there is room for {room:.0f}" if room > 0 else ", the weights leave no room"
    if fitting is None:
        stored = server.forward.profile.runtime.quantization or "bfloat16"
        return InputError(problem, hint=f"a smaller model or precision than {a.name} in {stored}")
    return InputError(problem, hint=f"--tp {fitting}, or a smaller precision")


def _rank(option: PlanOption) -> tuple[int, float, float]:
    if option.sizing is None:
        return (1, 0.0, 0.0)
    cost = option.sizing.cost_per_hour
    gpus = option.sizing.gpus.value
    return (0, cost.value if cost else math.inf, gpus)


def _simulated(
    request: PlanRequest,
    target: TargetEntry,
    acceptance: Acceptance | None,
    options: Sequence[PlanOption],
    store: ProfileStore,
) -> Iterator[SimulatedOption]:
    """The best option of each GPU, simulated."""
    if request.simulation is None:
        return
    seen = set()
    for option in options:
        if option.sizing is None or option.gpu in seen:
            continue
        seen.add(option.gpu)
        forward = forward_for(request, target, (option.gpu, option.tensor_parallel), store)
        choice = SimulatedChoice(
            gpu=option.gpu,
            server=make_server(request, forward, acceptance),
            points=option.points,
            gpus=round(option.sizing.gpus.value),
            error=option.error or 0.0,
            slower=option.slower or 0.0,
            positions=target.positions,
        )
        try:
            yield simulate_option(request, request.simulation, choice)
        except InputError as failure:
            yield SimulatedOption(
                gpu=option.gpu, tensor_parallel=option.tensor_parallel, problem=str(failure)
            )
