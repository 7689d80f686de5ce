"""Search for the best plan over GPUs and tensor-parallel degrees."""

from __future__ import annotations

import dataclasses
import itertools
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
from costmodel.planning.result import Plan, PlanOption, SimulatedOption, plan_remarks
from costmodel.planning.servers import Server, choose, nearest, size
from costmodel.planning.simulation.percentiles import simulate_option
from costmodel.planning.sources import forward_for, is_file
from costmodel.profile.profile import Profile
from costmodel.profile.store import ProfileStore


def plan(request: PlanRequest, store: ProfileStore | None = None) -> Plan:
    """Size every GPU and degree of the request, and rank them.

    `store` is where profiles are looked up (None: the user's directory, then shipped ones). An
    option that cannot be planned is returned with its problem. Raises InputError for a request
    that contradicts itself, and where every option lacks its times for the same reason.
    """
    target = resolve_target(request.target, hub=True)
    request = dataclasses.replace(request, precision=request.precision.of(target))
    tokens = request.traffic.total_tokens
    if target.positions is not None and tokens > target.positions:
        raise InputError(
            f"prompt and answer are {tokens:.0f} tokens, {target.architecture.name} holds"
            f" {target.positions}",
            hint=f"Plan for at most {target.positions} tokens together",
        )
    if request.simulation is not None:
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
    acceptance, store = _acceptance(request), store or ProfileStore()
    places = itertools.product(request.gpus, request.degrees)
    options = [_option(request, target, acceptance, store, place) for place in places]
    options.sort(key=_rank)
    without_times = all(option.origin is None for option in options)
    if without_times and len({option.problem for option in options}) == 1:
        raise InputError(options[0].problem, hint=options[0].nearest)
    notes, assumptions = plan_remarks(request, options)
    simulated = _simulated(request, options, target.positions) if request.simulation else ()
    return Plan(
        request=request,
        options=tuple(options),
        acceptance=acceptance,
        notes=tuple(notes),
        assumptions=tuple(assumptions),
        simulated=tuple(simulated),
        published=tuple(_published(request, options[0])),
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
    option = _sized(request, option)
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
    store: ProfileStore,
    place: tuple[str, int],
) -> PlanOption:
    """One GPU and degree, with its sizing or the problem."""
    option = PlanOption(gpu=place[0], device=place[0], tensor_parallel=place[1])
    try:
        forward = forward_for(request, target, place, store)
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
        forward = forward_for(decoder, target, place, store)
    server = make_server(decoder, forward, acceptance)
    trees = server.choices(request.traffic, request.most_running)
    return dataclasses.replace(option, with_trees=tuple(trees))


def _published(request: PlanRequest, best: PlanOption) -> Iterator[tuple[str, float]]:
    """Speed-ups by published acceptance where the plan has none: labels, the least first."""
    at, plain = best.sizing, best.server
    if request.acceptance or request.policy.kind != "auto" or at is None or plain is None:
        return
    if request.drafter not in (None, "dflash"):
        return
    for dataset in published_extremes(request.target):
        acceptance = find_acceptance(dataset, request.target)
        server = make_server(request, plain.forward, acceptance)
        drafting = server.best(request.traffic, at.at_load.running)
        yield acceptance.label, at.at_load.tpot_s / drafting.tpot_s


def _simulated(
    request: PlanRequest, options: Sequence[PlanOption], positions: int | None
) -> Iterator[SimulatedOption]:
    """The best option of each GPU under the simulated requests."""
    best_of_gpu: dict[str, PlanOption] = {}
    for option in (option for option in options if option.sizing):
        best_of_gpu.setdefault(option.gpu, option)
    for option in best_of_gpu.values():
        try:
            yield simulate_option(request, option, positions)
        except InputError as failure:
            yield SimulatedOption(
                gpu=option.gpu, tensor_parallel=option.tensor_parallel, problem=str(failure)
            )


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
            server=server,
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
            tokens = server.held_tokens(request.traffic.total_tokens)
            larger = (n for n in DEGREES if n > degree and server.cache_tokens(n) >= tokens)
            room, fitting = server.cache_tokens(degree), next(larger, None)
            problem = f"does not fit: a request needs {tokens:.0f} cached tokens"
            problem += (
                f", there is room for {room:.0f}" if room > 0 else ", the weights leave no room"
            )
            hint = f"--tp {fitting}, or a smaller precision"
            if fitting is None:
                stored = forward.profile.runtime.quantization or "bfloat16"
                hint = f"a smaller model or precision than {a.name} in {stored}"
            raise InputError(problem, hint=hint)
    except RooftreeError as failure:
        return dataclasses.replace(option, problem=failure.problem, nearest=failure.hint)
    option = dataclasses.replace(
        option, choices=tuple(choices), points=tuple(choice.best for choice in choices)
    )
    return _sized(request, option)


def _sized(request: PlanRequest, option: PlanOption) -> PlanOption:
    at_most, server = choose(option.points, request.goals), option.server
    if at_most is None or server is None:
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
    sizing = size(request, option.gpu, forward, option.points, error, slower)
    doubts = option.doubts
    if sizing is not None and server.drafter is not None:
        alone = dataclasses.replace(server, drafter=None, acceptance=None)
        points = alone.points(request.traffic, request.most_running)
        plain = size(request, option.gpu, forward, points, error)
        if plain is not None and plain.gpus.value < sizing.gpus.value:
            doubts += (
                f"{option.gpu}: {plain.gpus.value:.0f} GPUs are enough without a drafter, whose"
                " weights and cache leave room for fewer requests",
            )
    return dataclasses.replace(option, error=error, slower=slower, sizing=sizing, doubts=doubts)


def _rank(option: PlanOption) -> tuple[int, float, float]:
    if option.sizing is None:
        return (1, 0.0, 0.0)
    cost = option.sizing.cost_per_hour
    gpus = option.sizing.gpus.value
    return (0, cost.value if cost else math.inf, gpus)
