"""Number of GPUs for a request rate, their latency and cost at it, and the intervals of both."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from costmodel.planning.request import Goals, PlanRequest
from costmodel.planning.servers import OperatingPoint

# Half the width of an 80 % interval over the mean absolute error, for normally distributed errors:
# 1.2816 x 1.2533.
INTERVAL = 1.606
# Mean error of times per token against 1,043 published servers, pairs of GPU and model left out
# (lab/studies/results/capacity_accuracy.json).
SERVER_ERROR = 0.106
_TOKENS = 1e6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A value with its 80 % interval; `high` is None where the goals are missed at that end."""

    value: float
    low: float
    high: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """The GPUs for the request's rate, and their latency, cost and power at it.

    `at_most`: a server at the most requests at once that hold the goals; `at_load`: a server at
    its share of the rate. `cost_per_million` is per million output tokens; `watts` is an upper
    bound, from power limits or TDP.
    """

    at_most: OperatingPoint
    at_load: OperatingPoint
    gpus: Interval
    tpot_s: Interval
    ttft_s: Interval
    cost_per_hour: Interval | None
    cost_per_million: Interval | None
    watts: float | None
    joules_per_token: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The devices of one server: number, name in the price list, power of each."""

    gpu: str
    devices: int
    power_w: float | None


def size(
    request: PlanRequest, group: Group, points: Sequence[OperatingPoint], error: float
) -> Sizing | None:
    """The sizing for the request's rate; None where no point holds the goals.

    `error` is the expected relative error of all times. For the intervals the choice is repeated
    with all times shorter and longer.
    """
    at_most = choose(points, request.goals)
    if at_most is None:
        return None
    wide = math.exp(INTERVAL * error)
    count = _gpus(request, group, at_most, 1.0)
    quick, slow = (choose(points, request.goals, factor) for factor in (1 / wide, wide))
    low = count if quick is None else min(_gpus(request, group, quick, 1 / wide), count)
    high = None if slow is None else max(_gpus(request, group, slow, wide), count)
    gpus = Interval(value=count, low=low, high=high)
    at_load = best_at(points, request.rate / (count / group.devices)) or at_most
    price = request.prices.get(group.gpu)
    per_hour = None if price is None else _scaled(gpus, price)
    tokens_per_s = request.rate * request.traffic.output_tokens
    watts = None if group.power_w is None else group.power_w * count
    per_token = _TOKENS / (3600 * tokens_per_s)
    return Sizing(
        at_most=at_most,
        at_load=at_load,
        gpus=gpus,
        tpot_s=_around(at_load.tpot_s, wide),
        ttft_s=_around(at_load.ttft_s, wide),
        cost_per_hour=per_hour,
        cost_per_million=None if per_hour is None else _scaled(per_hour, per_token),
        watts=watts,
        joules_per_token=None if watts is None else watts / tokens_per_s,
    )


def choose(
    points: Sequence[OperatingPoint], goals: Goals, factor: float = 1.0
) -> OperatingPoint | None:
    """The point of most throughput that holds the goals, with all times multiplied by `factor`."""
    holding = [point for point in points if excess(point, goals, factor) <= 1]
    return max(holding, key=lambda point: point.requests_per_s, default=None)


def nearest(points: Sequence[OperatingPoint], goals: Goals) -> OperatingPoint:
    """The point that misses the goals by the smallest factor."""
    return min(points, key=lambda point: excess(point, goals))


def excess(point: OperatingPoint, goals: Goals, factor: float = 1.0) -> float:
    """The larger of the two ratios to the goals; 0 without goals."""
    ratios = [0.0]
    if goals.tpot_s is not None:
        ratios.append(factor * point.tpot_s / goals.tpot_s)
    if goals.ttft_s is not None:
        ratios.append(factor * point.ttft_s / goals.ttft_s)
    return max(ratios)


def best_at(points: Sequence[OperatingPoint], requests_per_s: float) -> OperatingPoint | None:
    """The first point with this throughput; None where no point has it."""
    return next((p for p in points if p.requests_per_s >= requests_per_s), None)


def replicas_for(rate: float, requests_per_s: float, utilisation: float) -> int:
    """Servers for a rate, each loaded to `utilisation` of its throughput; at least 1."""
    return max(1, math.ceil(rate / (utilisation * requests_per_s) - 1e-9))


def _gpus(request: PlanRequest, group: Group, point: OperatingPoint, factor: float) -> int:
    per_server = point.requests_per_s / factor
    return replicas_for(request.rate, per_server, request.utilisation) * group.devices


def _around(value: float, wide: float) -> Interval:
    return Interval(value=value, low=value / wide, high=value * wide)


def _scaled(interval: Interval, factor: float) -> Interval:
    high = None if interval.high is None else factor * interval.high
    return Interval(value=factor * interval.value, low=factor * interval.low, high=high)
