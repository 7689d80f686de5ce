"""Percentiles of a plan's latencies by simulation, and the smallest fleet that holds their goals.

Each GPU's best option is simulated at the number of GPUs that the means ask for. Where a goal is
missed, the same requests are served by more servers until all goals are held; latencies are taken
to fall with every server more. For the interval of each percentile the whole simulation is run
again with all times shorter and longer by the expected error of the plan.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from costmodel.capacity.arrivals import Sampling, shares
from costmodel.capacity.goals import PERCENTS, Goals
from costmodel.capacity.operating import OperatingPoint
from costmodel.capacity.operating import Server as PlannedServer
from costmodel.capacity.request import PlanRequest
from costmodel.capacity.requests import Requests
from costmodel.capacity.server_steps import speculation_of, step_grid
from costmodel.capacity.simulate import Server, simulate
from costmodel.capacity.simulated import EDGE_SHARE, SimulationResult
from costmodel.capacity.sizing import INTERVAL, Interval

# The search for enough servers ends at so many times those that the means ask for.
MOST_TIMES = 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Mean and percentiles in seconds with their 80 % intervals; `high` None: the queue grows."""

    mean: Interval
    p50: Interval
    p90: Interval
    p95: Interval
    p99: Interval


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """So many GPUs under the simulated requests.

    `waiting`: arrival to admission; `tpot` None where every answer has one token. `utilisation`:
    share of the time in which a server runs a step; `running`: requests at once on a server.
    `overloaded`: the queue grows. `missed`: goals by name.
    """

    gpus: int
    waiting: Spread
    ttft: Spread
    tpot: Spread | None
    utilisation: float
    running: float
    overloaded: bool
    missed: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """One option: the GPUs that means ask for, and the smallest fleet that holds all goals.

    `enough` is `planned` where that holds them, None where no fleet up to `tried_gpus` does;
    `nearest` then is the largest one. `cost_per_hour`: of `enough`, where there is a price.
    `problem`: why nothing could be simulated.
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
class Measured:
    """Seconds of every request that is kept [requests], in the order of arrival."""

    waiting_s: NDArray[np.float64]
    ttft_s: NDArray[np.float64]
    tpot_s: NDArray[np.float64]
    utilisation: float
    running: float
    overloaded: bool

    def value(self, metric: str, percent: int | None) -> float:
        """A percentile, or the mean; 0 where there is nothing to take it of."""
        values: NDArray[np.float64] = getattr(self, f"{metric}_s")
        if not len(values):
            return 0.0
        return float(np.mean(values) if percent is None else np.percentile(values, percent))

    def missed(self, goals: Goals) -> tuple[str, ...]:
        """The goals that are not held; all of them under a queue that grows."""
        means = {"tpot": goals.tpot_s, "ttft": goals.ttft_s}
        found = [
            name
            for name, most_s in means.items()
            if most_s is not None and (self.overloaded or self.value(name, None) > most_s)
        ]
        return tuple(
            found
            + [
                goal.name
                for goal in goals.percentiles
                if self.overloaded or self.value(goal.metric, goal.percent) > goal.seconds
            ]
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The option that is simulated: its server, trees, GPUs and expected error of times."""

    gpu: str
    server: PlannedServer
    points: Sequence[OperatingPoint]
    gpus: int
    error: float
    positions: int | None = None


def simulate_option(request: PlanRequest, sampling: Sampling, choice: Choice) -> Simulated:
    """The option's percentiles, and the smallest fleet that holds the goals.

    Raises InputError where simpy is not installed or a request never fits.
    """
    devices = choice.server.forward.tensor_parallel
    serve = _serving(request, sampling, choice)

    def fleet(servers: int) -> Fleet:
        wide = math.exp(INTERVAL * choice.error)
        ends = [serve(servers, factor) for factor in (1.0, 1 / wide, wide)]
        return _fleet(servers * devices, ends, request.goals)

    def holds(servers: int) -> bool:
        return not serve(servers, 1.0).missed(request.goals)

    first = choice.gpus // devices
    planned, most = fleet(first), first * MOST_TIMES
    if sampling.trace is not None:  # one request a server at least
        most = max(first, min(most, sampling.count))
    enough: Fleet | None = planned
    if planned.missed:
        found = smallest(holds, first, most)
        enough = None if found is None else fleet(found)
    price = request.prices.get(choice.gpu)
    return Simulated(
        gpu=choice.gpu,
        tensor_parallel=devices,
        planned=planned,
        enough=enough,
        tried_gpus=(most if enough is None else enough.gpus // devices) * devices,
        nearest=fleet(most) if enough is None else None,
        cost_per_hour=enough.gpus * price if enough is not None and price else None,
    )


def smallest(holds: Callable[[int], bool], below: int, most: int) -> int | None:
    """The smallest number in (below, most] that holds, if all above one that holds do too."""
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
    request: PlanRequest, sampling: Sampling, choice: Choice
) -> Callable[[int, float], Measured]:
    """The simulation by number of servers and a factor on all times; each is run once."""
    planned, points = choice.server, choice.points
    server = Server(
        rules=planned.rules, cache_tokens=planned.room(), max_sequences=points[-1].running
    )
    speculation = speculation_of(points, planned.acceptance)

    def parts(servers: int) -> list[Requests]:
        return shares(sampling, request.traffic, request.rate, servers, choice.positions)

    longest = max(int((part.prompt_tokens + part.output_tokens).max()) for part in parts(1))
    grid = step_grid(planned, points, longest)

    @cache
    def serve(servers: int, factor: float) -> Measured:
        def step_s(batch: int, prompt_tokens: int, context: float) -> float:
            return factor * grid(batch, prompt_tokens, context)

        results = []
        for number, part in enumerate(parts(servers)):
            generator = np.random.default_rng((sampling.seed, number))
            results.append(simulate(part, server, step_s, speculation, generator))
        return gather(results)

    return serve


def gather(results: Sequence[SimulationResult]) -> Measured:
    """Servers that were dealt requests in turn, together; without the requests at either end."""
    count = sum(len(result.requests) for result in results)
    edge = int(EDGE_SHARE * count)

    def dealt(values: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
        whole = np.empty(count)
        for number, part in enumerate(values):
            whole[number :: len(results)] = part
        return whole[edge : count - edge]

    arrivals = dealt([result.requests.arrival_s for result in results])
    start_s, end_s = float(arrivals[0]), float(arrivals[-1])
    if end_s <= start_s:
        end_s = max(float(result.last_s.max()) for result in results)
    held_s = dealt([result.last_s - result.admitted_s for result in results])
    tpot_s = dealt([result.tpot_s for result in results])
    return Measured(
        waiting_s=dealt([result.waiting_s for result in results]),
        ttft_s=dealt([result.ttft_s for result in results]),
        tpot_s=tpot_s[~np.isnan(tpot_s)],
        utilisation=float(np.mean([result.busy_share(start_s, end_s) for result in results])),
        running=float(np.sum(held_s)) / (end_s - start_s) / len(results),  # Little's law
        overloaded=any(result.overloaded for result in results),
    )


def _fleet(gpus: int, ends: Sequence[Measured], goals: Goals) -> Fleet:
    """`ends`: with the times as they are expected, shorter and longer."""
    middle = ends[0]
    spreads: Mapping[str, Spread] = {
        metric: _spread(metric, ends) for metric in ("waiting", "ttft", "tpot")
    }
    return Fleet(
        gpus=gpus,
        waiting=spreads["waiting"],
        ttft=spreads["ttft"],
        tpot=spreads["tpot"] if len(middle.tpot_s) else None,
        utilisation=middle.utilisation,
        running=middle.running,
        overloaded=middle.overloaded,
        missed=middle.missed(goals),
    )


def _spread(metric: str, ends: Sequence[Measured]) -> Spread:
    found = {}
    for percent in (None, *PERCENTS):
        middle, low, high = (end.value(metric, percent) for end in ends)
        found["mean" if percent is None else f"p{percent}"] = Interval(
            value=middle,
            low=min(low, middle),
            high=None if ends[2].overloaded else max(high, middle),
        )
    return Spread(**found)
