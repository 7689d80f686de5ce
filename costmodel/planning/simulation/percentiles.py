"""Percentiles of a plan's latencies by simulation, and the smallest fleet that holds their goals.

Where a goal is missed at the number of GPUs that the means need, the same requests are served by
more servers until all are held; latencies are assumed to fall with every added server. The
intervals come from the simulation repeated with all times shorter and longer by the plan's error.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from costmodel.errors import InputError
from costmodel.planning.accuracy import INTERVAL
from costmodel.planning.request import PERCENTS, Goals, PlanRequest
from costmodel.planning.result import Fleet, PlanOption, SimulatedOption, TimeSpread
from costmodel.planning.servers import Interval, OperatingPoint, Server
from costmodel.planning.simulation.engine import SimulatedServer, SimulationResult, simulate
from costmodel.planning.simulation.steps import speculation_of, step_grid
from costmodel.planning.traffic import (
    MOST_TOKENS,
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
        return tuple(
            name
            for name, metric, percent, most_s in goals.limits
            if self.overloaded or self.value(metric, percent) > most_s
        )


def simulate_option(
    request: PlanRequest, option: PlanOption, positions: int | None = None
) -> SimulatedOption:
    """Percentiles of a sized option, and the smallest fleet that holds the goals.

    positions  of the target's window, where answers are cut
    Raises InputError for a request that never fits, and where nothing is to be simulated.
    """
    settings, sizing, server = request.simulation, option.sizing, option.server
    if settings is None or sizing is None or server is None:
        raise InputError("there is nothing to simulate")
    devices = server.forward.tensor_parallel * server.forward.ranks
    error, edge_share = option.error or 0.0, 0.0 if request.replays else EDGE_SHARE
    slower = max(error, option.slower or 0.0)
    factors = 1.0, math.exp(-INTERVAL * error), math.exp(INTERVAL * slower)

    def traces(servers: int) -> list[Trace]:
        return server_traces(settings, request.traffic, request.rate, servers, positions)

    longest = max(int((trace.prompt_tokens + trace.output_tokens).max()) for trace in traces(1))
    run = _runner(server, request.traffic, option.points, request.most_running, longest)

    @cache
    def serve(servers: int, factor: float) -> Latencies:
        results = [
            run(trace, (settings.seed, number), factor)
            for number, trace in enumerate(traces(servers))
        ]
        gathered = gather(results, edge_share)
        return dataclasses.replace(gathered, running=gathered.running / server.forward.ranks)

    def fleet(servers: int) -> Fleet:
        ends = [serve(servers, factor) for factor in factors]
        return _fleet(servers * devices, ends, request.goals)

    first = round(sizing.gpus.value) // devices
    planned, most = fleet(first), first * (1 if request.servers else MOST_TIMES)
    if settings.trace is not None:  # every server needs a request
        most = max(first, min(most, settings.count))
    enough: Fleet | None = planned
    if planned.missed:
        servers = smallest(lambda n: not serve(n, 1.0).missed(request.goals), first, most)
        enough = None if servers is None else fleet(servers)
    price = request.prices.get(option.gpu)
    return SimulatedOption(
        gpu=option.gpu,
        tensor_parallel=server.forward.tensor_parallel,
        planned=planned,
        enough=enough,
        tried_gpus=(most if enough is None else enough.gpus // devices) * devices,
        nearest=fleet(most) if enough is None else None,
        cost_per_hour=enough.gpus * price if enough is not None and price else None,
    )


def replay(server: Server, requests: Trace, most_running: int, seed: int = 0) -> SimulationResult:
    """The very requests of a trace, served by one server with at most `most_running` at once.

    Raises InputError where a request never fits.
    """
    points = server.points(requests.means, most_running)
    if not points:
        raise InputError("not one of the requests fits into the server's cache")
    longest = int((requests.prompt_tokens + requests.output_tokens).max())
    return _runner(server, requests.means, points, most_running, longest)(requests, seed)


def _runner(
    server: Server,
    traffic: Traffic,
    points: Sequence[OperatingPoint],
    most_running: int,
    longest: int,
) -> Callable[..., SimulationResult]:
    """A function (requests, seed, factor on all times) that serves requests by these points.

    As many are served at once as the points have. Where these end because the mean request would
    fill the cache, the cache alone decides, of an engine that evicts and while verifications leave
    half of a step.
    """
    most, rules = points[-1].running, server.rules
    rows = most_running * (points[-1].nodes + 1)
    if not rules.memory.whole_answer and most >= server.most_running(traffic):
        most = most_running if rows <= rules.step_tokens / 2 else most
    limits = SimulatedServer(
        rules=rules, cache_tokens=server.cache_tokens(), max_sequences=most,
        held_tokens=server.held_tokens, ranks=server.forward.ranks,
        front_s=server.overheads.front_s,
    )  # fmt: skip
    speculation = speculation_of(points, server.acceptance)
    grid = step_grid(server, points, longest)

    def run(requests: Trace, seed: int | tuple[int, int], factor: float = 1.0) -> SimulationResult:
        generator = np.random.default_rng(seed)
        return simulate(
            requests, limits, lambda *load: factor * grid(*load), speculation, generator
        )

    return run


def smallest(holds: Callable[[int], bool], below: int, most: int) -> int | None:
    """The smallest n in (below, most] that holds, if all larger ones do too; None without one."""
    while below < most:
        high = min(2 * below, most)
        if holds(high):
            return bisect.bisect_left(range(high), True, below + 1, key=holds)
        below = high
    return None


def server_traces(
    settings: SimulationSettings, traffic: Traffic, rate: float, servers: int, positions: int | None
) -> list[Trace]:
    """The requests of each server to simulate.

    Drawn requests are those of one server at its part of the rate: requests sent to servers at
    random remain Poisson. A trace is stretched to the rate and dealt to the servers in turn. Equal
    seeds draw equal requests, closer together at a higher rate. `positions` cuts answers where the
    target's window is full.
    """
    if (trace := settings.trace) is not None:
        times_s = (trace.arrival_s - trace.arrival_s[0]) * (trace.rate_per_s / rate)
        parts = (slice(n, settings.count, servers) for n in range(min(servers, settings.count)))
        return [
            Trace(
                arrival_s=times_s[part],
                prompt_tokens=trace.prompt_tokens[part],
                output_tokens=trace.output_tokens[part],
            )
            for part in parts
        ]
    most = positions or MOST_TOKENS
    drawn = poisson_trace(
        1.0, settings.count, traffic, np.random.default_rng(settings.seed),
        variation=settings.variation, most_tokens=most - 1,
    )  # fmt: skip
    return [
        dataclasses.replace(
            drawn,
            arrival_s=drawn.arrival_s * servers / rate,
            output_tokens=np.minimum(drawn.output_tokens, most - drawn.prompt_tokens),
        )
    ]


def gather(results: Sequence[SimulationResult], edge_share: float = EDGE_SHARE) -> Latencies:
    """Latencies of all servers, which were dealt requests in turn; both ends are left out.

    Without ends the whole of the requests counts, whose queue comes to an end.
    """
    count = sum(len(result.requests) for result in results)
    edge = int(edge_share * count)

    def undealt(name: str) -> Array:
        merged = np.empty(count)
        for number, part in enumerate(results):
            merged[number :: len(results)] = getattr(part, name)
        return merged[edge : count - edge]

    arrivals, tpot_s = undealt("arrival_s"), undealt("tpot_s")
    start_s, end_s = float(arrivals[0]), float(arrivals[-1])
    last_s = max(float(result.last_s.max()) for result in results)
    if end_s <= start_s or not edge_share:
        end_s = last_s
    held_s = [
        np.clip(result.last_s, start_s, end_s) - np.clip(result.admitted_s, start_s, end_s)
        for result in results
    ]
    return Latencies(
        waiting_s=undealt("waiting_s"),
        ttft_s=undealt("ttft_s"),
        tpot_s=tpot_s[~np.isnan(tpot_s)],
        utilisation=float(np.mean([result.busy_share(start_s, end_s) for result in results])),
        running=float(sum(map(np.sum, held_s))) / (end_s - start_s) / len(results),
        makespan_s=last_s - min(float(result.arrival_s[0]) for result in results),
        overloaded=edge_share > 0 and any(result.overloaded for result in results),
    )


def _fleet(gpus: int, ends: Sequence[Latencies], goals: Goals) -> Fleet:
    """`ends` are the latencies with the expected times, shorter ones and longer ones."""
    middle, _, slow = ends

    def spread(metric: str) -> TimeSpread:
        intervals = {}
        for percent in (None, *PERCENTS):
            value, low, high = (end.value(metric, percent) for end in ends)
            intervals["mean" if percent is None else f"p{percent}"] = Interval(
                value=value, low=min(low, value), high=None if slow.overloaded else max(high, value)
            )
        return TimeSpread(**intervals)

    return Fleet(
        gpus=gpus,
        waiting=spread("waiting"),
        ttft=spread("ttft"),
        tpot=spread("tpot") if len(middle.tpot_s) else None,
        utilisation=middle.utilisation,
        running=middle.running,
        makespan_s=middle.makespan_s,
        overloaded=middle.overloaded,
        missed=middle.missed(goals),
    )
