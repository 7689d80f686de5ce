"""Steady state of a simulated server: means and percentiles with intervals from batch means.

A long run is cut into consecutive batches. Batches much longer than the queue's memory are nearly
independent, so the spread of a statistic over batches gives an interval by Student's t
(A. M. Law, Simulation Modeling and Analysis, chapter 9).
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import t as student

from costmodel.errors import InputError
from costmodel.planning.simulation.engine import SimulationResult
from costmodel.planning.simulation.percentiles import EDGE_SHARE

Array = NDArray[np.float64]

BATCHES = 20
CONFIDENCE = 0.95
# Smallest batch whose percentiles are used.
LEAST_IN_BATCH = 10


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A statistic with its 95 % interval; the bounds are NaN for too few values."""

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LatencySummary:
    """Mean and percentiles of a latency in seconds, each with its 95 % interval."""

    mean: Estimate
    p50: Estimate
    p90: Estimate
    p99: Estimate

    @classmethod
    def of(cls, values: Array) -> LatencySummary:
        """The summary of `values` [requests] in the order of arrival."""
        p50, p90, p99 = (percentile_estimate(values, percent) for percent in (50, 90, 99))
        return cls(mean=mean_estimate(values), p50=p50, p90=p90, p99=p99)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A server in steady state.

    `waiting`: arrival to admission; `ttft`: arrival to the first token; `tpot`: seconds per token
    after the first, None where every answer has one token; `end_to_end`: arrival to the last token.
    `utilisation`: share of the time in which a step runs; `running`: mean of requests at once.
    `overloaded`: the queue grows, so the latencies hold for this number of requests only.
    """

    waiting: LatencySummary
    ttft: LatencySummary
    tpot: LatencySummary | None
    end_to_end: LatencySummary
    requests_per_s: float
    output_tokens_per_s: float
    utilisation: float
    running: float
    overloaded: bool


def summarise(result: SimulationResult, edge_share: float = EDGE_SHARE) -> Summary:
    """The steady state, without `edge_share` of the requests at either end. Raises InputError."""
    if not 0 <= edge_share < 0.5:
        raise InputError(f"edge_share must be from 0 to below 0.5 (is {edge_share!r})")
    edge = int(edge_share * len(result.requests))
    inner = slice(edge, len(result.requests) - edge)
    tpot_s = result.tpot_s[inner]
    tpot_s = tpot_s[~np.isnan(tpot_s)]
    start_s, end_s = _window_s(result, inner)
    done = (result.last_s > start_s) & (result.last_s <= end_s)
    requests_per_s = float(np.sum(done)) / (end_s - start_s)
    in_server_s = (result.last_s - result.admitted_s)[inner]
    return Summary(
        waiting=LatencySummary.of(result.waiting_s[inner]),
        ttft=LatencySummary.of(result.ttft_s[inner]),
        tpot=LatencySummary.of(tpot_s) if len(tpot_s) else None,
        end_to_end=LatencySummary.of(result.end_to_end_s[inner]),
        requests_per_s=requests_per_s,
        output_tokens_per_s=float(np.sum(result.requests.output_tokens[done])) / (end_s - start_s),
        utilisation=result.busy_share(start_s, end_s),
        running=requests_per_s * float(np.mean(in_server_s)),  # Little's law
        overloaded=result.overloaded,
    )


def mean_estimate(values: ArrayLike) -> Estimate:
    """The mean of a series [values] in its order. Raises InputError for an empty one."""
    return _estimate(values, None)


def percentile_estimate(values: ArrayLike, percent: float) -> Estimate:
    """A percentile of a series [values] in its order. Raises InputError."""
    if not 0 <= percent <= 100:
        raise InputError(f"a percentile must be from 0 to 100 (is {percent!r})")
    return _estimate(values, percent)


def _window_s(result: SimulationResult, inner: slice) -> tuple[float, float]:
    """First to last arrival within `inner`; to the last token where all arrive at once."""
    arrivals_s = result.requests.arrival_s[inner]
    start_s, end_s = float(arrivals_s[0]), float(arrivals_s[-1])
    return (start_s, end_s) if end_s > start_s else (start_s, float(result.last_s.max()))


def _estimate(values: ArrayLike, percent: float | None) -> Estimate:
    series = np.asarray(values, dtype=np.float64)
    if series.ndim != 1 or not len(series):
        raise InputError("there are no values to take a statistic of")
    value = float(_statistic(series[None, :], percent)[0])
    size = len(series) // BATCHES
    if size < LEAST_IN_BATCH:
        return Estimate(value=value, low=math.nan, high=math.nan)
    # The remainder is dropped at the front, where a run is farthest from its steady state.
    batches = series[len(series) - size * BATCHES :].reshape(BATCHES, size)
    spread = np.std(_statistic(batches, percent), ddof=1) / math.sqrt(BATCHES)
    reach = float(student.ppf((1 + CONFIDENCE) / 2, BATCHES - 1) * spread)
    return Estimate(value=value, low=value - reach, high=value + reach)


def _statistic(batches: Array, percent: float | None) -> Array:
    """The statistic of each row of [batches, values]."""
    if percent is None:
        return np.asarray(np.mean(batches, axis=1), dtype=np.float64)
    return np.asarray(np.percentile(batches, percent, axis=1), dtype=np.float64)
