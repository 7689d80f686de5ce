"""How many GPUs a rate takes, what they do at it, and how uncertain that is."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from costmodel.capacity.goals import Goals
from costmodel.capacity.operating import OperatingPoint, best_at, replicas_for
from costmodel.capacity.request import PlanRequest

# Half the width of an 80 % interval in mean absolute errors, for normal errors: 1.2816 x 1.2533.
INTERVAL = 1.606
# Mean error of times per token against 1,043 published servers, pairs of GPU and model left out
# (benchmarks/results/capacity_accuracy.json).
SERVER_ERROR = 0.107
_TOKENS = 1e6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A value and the 80 % interval around it; `high` None: the goals are not held there."""

    value: float
    low: float
    high: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """How many GPUs, and what they do at the rate that was asked for.

    `at_most`: the server at the largest concurrency that holds the goals; `at_load`: where the
    rate leaves each server. `cost_per_million` is of output tokens, `watts` an upper bound from
    power limits or TDP.
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
    """Devices of one server: how many, by what name they are priced, the power of each."""

    gpu: str
    devices: int
    power_w: float | None


def size(
    request: PlanRequest, group: Group, points: Sequence[OperatingPoint], error: float
) -> Sizing | None:
    """The fleet for the rate; None where the goals are not held at any concurrency.

    `error` is the expected relative error of all times. For the interval the choice is made
    again with all times longer and shorter.
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
    """The point that completes most and holds the goals with all times multiplied by `factor`."""
    held = [point for point in points if excess(point, goals, factor) <= 1]
    return max(held, key=lambda point: point.requests_per_s, default=None)


def nearest(points: Sequence[OperatingPoint], goals: Goals) -> OperatingPoint:
    """The point that misses the goals by the smallest factor."""
    return min(points, key=lambda point: excess(point, goals))


def excess(point: OperatingPoint, goals: Goals, factor: float = 1.0) -> float:
    """The larger of both ratios to the goals; 0 without goals."""
    ratios = [0.0]
    if goals.tpot_s is not None:
        ratios.append(factor * point.tpot_s / goals.tpot_s)
    if goals.ttft_s is not None:
        ratios.append(factor * point.ttft_s / goals.ttft_s)
    return max(ratios)


def _gpus(request: PlanRequest, group: Group, point: OperatingPoint, factor: float) -> int:
    per_server = point.requests_per_s / factor
    return replicas_for(request.rate, per_server, request.utilisation) * group.devices


def _around(value: float, wide: float) -> Interval:
    return Interval(value=value, low=value / wide, high=value * wide)


def _scaled(interval: Interval, factor: float) -> Interval:
    high = None if interval.high is None else factor * interval.high
    return Interval(value=factor * interval.value, low=factor * interval.low, high=high)
