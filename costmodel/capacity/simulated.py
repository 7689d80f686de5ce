"""What a simulation says: latencies, throughput and utilisation in steady state."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from costmodel.capacity.batch_means import Estimate, mean_estimate, percentile_estimate
from costmodel.capacity.requests import Requests
from costmodel.errors import InputError

Array = NDArray[np.float64]

# The server starts empty and drains at the end: these requests at either end are left out.
EDGE_SHARE = 0.1
# More requests than this waiting at the last arrival are a queue that grows.
OVERLOAD_SHARE, OVERLOAD_LEAST = 0.02, 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Mean and percentiles of one latency in seconds, each with its 95 % interval."""

    mean: Estimate
    p50: Estimate
    p90: Estimate
    p99: Estimate

    @classmethod
    def of(cls, values: Array) -> Latency:
        """Of values in the order of arrival."""
        p50, p90, p99 = (percentile_estimate(values, percent) for percent in (50, 90, 99))
        return cls(mean=mean_estimate(values), p50=p50, p90=p90, p99=p99)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A server in steady state.

    `waiting`: arrival to admission; `ttft`: to the first token; `tpot`: seconds a token after the
    first, None where every answer has one token; `end_to_end`: to the last token. `utilisation`:
    share of the time in which a step runs; `running`: requests admitted at a time, on average.
    `overloaded`: the queue grows, so that latencies are those of this many requests only.
    """

    waiting: Latency
    ttft: Latency
    tpot: Latency | None
    end_to_end: Latency
    requests_per_s: float
    output_tokens_per_s: float
    utilisation: float
    running: float
    overloaded: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulationResult:
    """Times of every request [requests] and of idle spells [spells, start and end], in seconds."""

    requests: Requests
    admitted_s: Array
    first_s: Array
    last_s: Array
    idle_s: Array
    steps: int

    @property
    def waiting_s(self) -> Array:
        """Arrival to admission."""
        return self.admitted_s - self.requests.arrival_s

    @property
    def ttft_s(self) -> Array:
        """Arrival to the first token."""
        return self.first_s - self.requests.arrival_s

    @property
    def tpot_s(self) -> Array:
        """Seconds a token after the first; NaN for answers of one token."""
        further = self.requests.output_tokens - 1
        spent_s = self.last_s - self.first_s
        return np.where(further > 0, spent_s / np.maximum(further, 1), np.nan)

    @property
    def end_to_end_s(self) -> Array:
        """Arrival to the last token."""
        return self.last_s - self.requests.arrival_s

    @property
    def overloaded(self) -> bool:
        """Whether the queue still held a growing backlog when the last request arrived."""
        count = len(self.requests)
        waiting = int(np.sum(self.admitted_s > self.requests.arrival_s[-1]))
        return waiting > max(OVERLOAD_SHARE * count, OVERLOAD_LEAST)

    def summary(self, edge_share: float = EDGE_SHARE) -> Summary:
        """The steady state, without that share of requests at either end. Raises InputError."""
        if not 0 <= edge_share < 0.5:
            raise InputError(f"edge_share must be from 0 to below 0.5 (is {edge_share!r})")
        edge = int(edge_share * len(self.requests))
        kept = slice(edge, len(self.requests) - edge)
        tpot = self.tpot_s[kept]
        tpot = tpot[~np.isnan(tpot)]
        start_s, end_s = self._window_s(kept)
        done = (self.last_s > start_s) & (self.last_s <= end_s)
        requests_per_s = float(np.sum(done)) / (end_s - start_s)
        held_s = (self.last_s - self.admitted_s)[kept]
        return Summary(
            waiting=Latency.of(self.waiting_s[kept]),
            ttft=Latency.of(self.ttft_s[kept]),
            tpot=Latency.of(tpot) if len(tpot) else None,
            end_to_end=Latency.of(self.end_to_end_s[kept]),
            requests_per_s=requests_per_s,
            output_tokens_per_s=float(np.sum(self.requests.output_tokens[done]))
            / (end_s - start_s),
            utilisation=self.busy_share(start_s, end_s),
            running=requests_per_s * float(np.mean(held_s)),  # Little's law
            overloaded=self.overloaded,
        )

    def _window_s(self, kept: slice) -> tuple[float, float]:
        """First to last arrival that is kept; to the last token where all arrive at once."""
        arrivals = self.requests.arrival_s[kept]
        start_s, end_s = float(arrivals[0]), float(arrivals[-1])
        return (start_s, end_s) if end_s > start_s else (start_s, float(self.last_s.max()))

    def busy_share(self, start_s: float, end_s: float) -> float:
        """Share of a span of time in which a step ran; the span must not be empty."""
        return 1.0 - self._idle_within_s(start_s, end_s) / (end_s - start_s)

    def _idle_within_s(self, start_s: float, end_s: float) -> float:
        spells = np.clip(self.idle_s, start_s, end_s)
        return float(np.sum(spells[:, 1] - spells[:, 0]))
