"""Percentiles of a plan's latencies by simulation, and the smallest fleet that holds their goals.

The best option of each GPU is simulated at the number of GPUs that its means need. Where a goal is
missed, the same requests are served by more servers until all goals are held; latencies are assumed
to fall with every added server. The intervals come from the whole simulation repeated with all
times shorter and longer by the expected error of the plan.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from costmodel.errors import InputError
from costmodel.planning.accuracy import INTERVAL
from costmodel.planning.request import PERCENTS, Goals, PlanRequest
from costmodel.planning.result import Fleet, SimulatedOption, TimeSpread
from costmodel.planning.servers import Interval, OperatingPoint, Server
from costmodel.planning.simulation.engine import SimulatedServer, SimulationResult, simulate
from costmodel.planning.simulation.steps import speculation_of, step_grid
from costmodel.planning.traffic import (
    MOST_TOKENS,
    LognormalLength,
    SimulationSettings,
    Trace,
    Traffic,
    poisson_trace,
)
from costmodel.statistics import Array

# Largest fleet of the search, as a multiple of the servers that the means need.
MOST_TIMES = 32
# Share of the requests left out at either end: a server starts empty and drains at the end.
EDGE_SHARE = 0.1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Seconds of every request away from both ends [requests], in the order of arrival."""

    waiting_s: Array
    ttft_s: Array
    tpot_s: Array
    utilisation: float
    running: float
    makespan_s: float
    overloaded: bool

    def value(self, metric: str, percent: int | None) -> float:
        """A percentile, or the mean (None), of `waiting`, `ttft` or `tpot`; 0 without values."""
        values: Array = getattr(self, f"{metric}_s")
        if not len(values):
            return 0.0
        return float(np.mean(values) if percent is None else np.percentile(values, percent))

    def missed(self, goals: Goals) -> tuple[str, ...]:
        """Names of the goals that are missed; all of them if the queue grows."""
        means = [("tpot", goals.tpot_s), ("ttft", goals.ttft_s)]
        limits: list[tuple[str, str, int | None, float]] = [
            (name, name, None, most_s) for name, most_s in means if most_s is not None
        ]
        limits += [(g.name, g.metric, g.percent, g.seconds) for g in goals.percentiles]
        return tuple(
            name
            for name, metric, percent, most_s in limits
            if self.overloaded or self.value(metric, percent) > most_s
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedChoice:
    """An option to simulate: server, best points, number of GPUs, expected errors of times."""

    gpu: str
    server: Server
    points: Sequence[OperatingPoint]
    gpus: int
    error: float
    slower: float = 0.0
    positions: int | None = None


def simulate_option(
    request: PlanRequest, settings: SimulationSettings, choice: SimulatedChoice
) -> SimulatedOption:
    """Percentiles of an option, and the smallest fleet that holds the goals.

    Raises InputError where simpy is not installed or a request never fits.
    """
    forward = choice.server.forward
    devices = forward.tensor_parallel * forward.ranks
    serve = _serving(request, settings, choice)

    def fleet(servers: int) -> Fleet:
        slower = max(choice.error, choice.slower)
        factors = 1.0, math.exp(-INTERVAL * choice.error), math.exp(INTERVAL * slower)
        ends = [serve(servers, factor) for factor in factors]
        return _fleet(servers * devices, ends, request.goals)

    def holds(servers: int) -> bool:
        return not serve(servers, 1.0).missed(request.goals)

    first = choice.gpus // devices
    planned, most = fleet(first), first * (1 if request.servers else MOST_TIMES)
    if settings.trace is not None:  # every server needs a request
        most = max(first, min(most, settings.count))
    enough: Fleet | None = planned
    if planned.missed:
        servers = smallest(holds, first, most)
        enough = None if servers is None else fleet(servers)
    price = request.prices.get(choice.gpu)
    return SimulatedOption(
        gpu=choice.gpu,
        tensor_parallel=forward.tensor_parallel,
        planned=planned,
        enough=enough,
        tried_gpus=(most if enough is None else enough.gpus // devices) * devices,
        nearest=fleet(most) if enough is None else None,
        cost_per_hour=enough.gpus * price if enough is not None and price else None,
    )


def replay(server: Server, requests: Trace, most_running: int, seed: int = 0) -> SimulationResult:
    """The very requests of a trace, served by one server with at most `most_running` at once.

    Raises InputError where simpy is not installed or a request never fits.
    """
    points = server.points(requests.means, most_running)
    if not points:
        raise InputError("not one of the requests fits into the server's cache")
    longest = int((requests.prompt_tokens + requests.output_tokens).max())
    speculation = speculation_of(points, server.acceptance)
    limits = _limits(server, requests.means, points, most_running)
    grid = step_grid(server, points, longest)
    return simulate(requests, limits, grid, speculation, np.random.default_rng(seed))


def _limits(
    server: Server, traffic: Traffic, points: Sequence[OperatingPoint], most_running: int
) -> SimulatedServer:
    """Limits of a server: its cache, and the sequences of its points.

    Where the points end because the mean request would fill the cache, the cache alone decides, of
    an engine that evicts and while verifications leave half of a step.
    """
    most, memory = points[-1].running, server.rules.memory
    rows = most_running * (points[-1].nodes + 1)
    if not memory.whole_answer and most >= server.most_running(traffic):
        most = most_running if rows <= server.rules.step_tokens / 2 else most
    return SimulatedServer(
        rules=server.rules, cache_tokens=server.cache_tokens(), max_sequences=most,
        held_tokens=server.held_tokens, ranks=server.forward.ranks,
        front_s=server.overheads.front_s,
    )  # fmt: skip


def smallest(holds: Callable[[int], bool], below: int, most: int) -> int | None:
    """The smallest n in (below, most] that holds, if all larger ones do too; None without one."""
    high = below
    while high < most:
        high = min(2 * high, most)
        if holds(high):
            break
        below = high
    else:
        return None
    while high - below > 1:
        middle = (below + high) // 2
        if holds(middle):
            high = middle
        else:
            below = middle
    return high


def _serving(
    request: PlanRequest, settings: SimulationSettings, choice: SimulatedChoice
) -> Callable[[int, float], Latencies]:
    """A function (servers, factor on all times) -> latencies that runs each case once."""
    planned, points = choice.server, choice.points
    speculation = speculation_of(points, planned.acceptance)
    server = _limits(planned, request.traffic, points, request.most_running)

    def traces(servers: int) -> list[Trace]:
        return server_traces(settings, request.traffic, request.rate, servers, choice.positions)

    longest = max(int((trace.prompt_tokens + trace.output_tokens).max()) for trace in traces(1))
    grid = step_grid(planned, points, longest)

    edge_share = 0.0 if request.replays else EDGE_SHARE

    @cache
    def serve(servers: int, factor: float) -> Latencies:
        def step_s(batch: int, prompt_tokens: int, context: float, prompt_context: float) -> float:
            return factor * grid(batch, prompt_tokens, context, prompt_context)

        results = []
        for number, trace in enumerate(traces(servers)):
            generator = np.random.default_rng((settings.seed, number))
            results.append(simulate(trace, server, step_s, speculation, generator))
        gathered = gather(results, edge_share)
        return dataclasses.replace(gathered, running=gathered.running / server.ranks)

    return serve


def server_traces(
    settings: SimulationSettings, traffic: Traffic, rate: float, servers: int, positions: int | None
) -> list[Trace]:
    """The requests of each server to simulate.

    Drawn requests are those of one server at its part of the rate: requests sent to servers at
    random remain Poisson. A trace is stretched to the rate and dealt to the servers in turn. Equal
    seeds draw equal requests, closer together at a higher rate. `positions` cuts answers where the
    target's window is full.
    """
    if settings.trace is not None:
        return _deal(settings.trace, settings.count, rate, servers)
    most = positions or MOST_TOKENS
    prompt, output = (
        LognormalLength(mean_tokens=mean, variation=settings.variation, most_tokens=most - 1)
        for mean in (traffic.prompt_tokens, traffic.output_tokens)
    )
    generator = np.random.default_rng(settings.seed)
    drawn = poisson_trace(1.0, settings.count, prompt, output, generator)
    return [
        dataclasses.replace(
            drawn,
            arrival_s=drawn.arrival_s * servers / rate,
            output_tokens=np.minimum(drawn.output_tokens, most - drawn.prompt_tokens),
        )
    ]


def _deal(trace: Trace, count: int, rate: float, servers: int) -> list[Trace]:
    stretch = trace.rate_per_s / rate
    times_s = (trace.arrival_s[:count] - trace.arrival_s[0]) * stretch
    return [
        Trace(
            arrival_s=times_s[server::servers],
            prompt_tokens=trace.prompt_tokens[:count][server::servers],
            output_tokens=trace.output_tokens[:count][server::servers],
        )
        for server in range(min(servers, count))
    ]


def gather(results: Sequence[SimulationResult], edge_share: float = EDGE_SHARE) -> Latencies:
    """Latencies of all servers, which were dealt requests in turn; both ends are left out.

    Without ends the whole of the requests counts, whose queue comes to an end.
    """
    count = sum(len(result.requests) for result in results)
    edge = int(edge_share * count)

    def undealt(values: Sequence[Array]) -> Array:
        merged = np.empty(count)
        for number, part in enumerate(values):
            merged[number :: len(results)] = part
        return merged[edge : count - edge]

    arrivals = undealt([result.requests.arrival_s for result in results])
    start_s, end_s = float(arrivals[0]), float(arrivals[-1])
    last_s = max(float(result.last_s.max()) for result in results)
    if end_s <= start_s or not edge_share:
        end_s = last_s
    held_s = [
        np.clip(result.last_s, start_s, end_s) - np.clip(result.admitted_s, start_s, end_s)
        for result in results
    ]
    tpot_s = undealt([result.tpot_s for result in results])
    return Latencies(
        waiting_s=undealt([result.waiting_s for result in results]),
        ttft_s=undealt([result.ttft_s for result in results]),
        tpot_s=tpot_s[~np.isnan(tpot_s)],
        utilisation=float(np.mean([result.busy_share(start_s, end_s) for result in results])),
        running=float(sum(map(np.sum, held_s))) / (end_s - start_s) / len(results),
        makespan_s=last_s - min(float(result.requests.arrival_s[0]) for result in results),
        overloaded=edge_share > 0 and any(result.overloaded for result in results),
    )


def _fleet(gpus: int, ends: Sequence[Latencies], goals: Goals) -> Fleet:
    """`ends` are the latencies with the expected times, shorter ones and longer ones."""
    middle = ends[0]
    return Fleet(
        gpus=gpus,
        waiting=_spread("waiting", ends),
        ttft=_spread("ttft", ends),
        tpot=_spread("tpot", ends) if len(middle.tpot_s) else None,
        utilisation=middle.utilisation,
        running=middle.running,
        makespan_s=middle.makespan_s,
        overloaded=middle.overloaded,
        missed=middle.missed(goals),
    )


def _spread(metric: str, ends: Sequence[Latencies]) -> TimeSpread:
    intervals = {}
    for percent in (None, *PERCENTS):
        middle, low, high = (end.value(metric, percent) for end in ends)
        intervals["mean" if percent is None else f"p{percent}"] = Interval(
            value=middle,
            low=min(low, middle),
            high=None if ends[2].overloaded else max(high, middle),
        )
    return TimeSpread(**intervals)
