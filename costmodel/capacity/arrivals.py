"""What a simulation of a plan is given: requests that are drawn, or those of a trace."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from costmodel.capacity.requests import MOST_TOKENS, LognormalLength, Requests, poisson_requests
from costmodel.errors import InputError

if TYPE_CHECKING:
    from costmodel.capacity.operating import Traffic

REQUESTS = 2000
# Requests of a trace below which percentiles say nothing.
LEAST_REQUESTS = 100
# Standard deviation of lengths over their mean where nobody says: between equal lengths and the
# exponential's 1.
VARIATION = 0.7


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How many requests are simulated, and where they come from.

    Without a trace `requests` of one server: Poisson arrivals and log-normal lengths whose
    standard deviation is `variation` x their mean. Of a trace as many from its start, None: all.
    """

    requests: int | None = None
    seed: int = 0
    variation: float = VARIATION
    trace: Requests | None = None

    def __post_init__(self) -> None:
        if self.requests is not None and self.requests < LEAST_REQUESTS:
            raise InputError(
                f"{self.requests} requests are too few for percentiles",
                hint=f"Simulate {LEAST_REQUESTS} or more",
            )
        if self.trace is not None and len(self.trace) < LEAST_REQUESTS:
            raise InputError(
                f"the trace has {len(self.trace)} requests, too few for percentiles",
                hint=f"Give {LEAST_REQUESTS} or more, or their means as --prompt-tokens,"
                " --output-tokens and --rate",
            )
        if self.seed < 0:
            raise InputError(f"the seed must be 0 or more (is {self.seed})")
        if not 0 <= self.variation < float("inf"):
            raise InputError(f"the variation of lengths must be 0 or more (is {self.variation:g})")

    @property
    def count(self) -> int:
        """Requests that are simulated."""
        if self.trace is None:
            return self.requests or REQUESTS
        return min(self.requests or len(self.trace), len(self.trace))

    def words(self) -> str:
        """What is simulated, for people."""
        if self.trace is not None:
            return f"{self.count} requests of the trace, dealt to the servers in turn"
        return (
            f"{self.count} requests of one server, Poisson arrivals, log-normal lengths with a"
            f" standard deviation of {self.variation:g} x the mean, seed {self.seed}"
        )


def shares(
    sampling: Sampling, traffic: Traffic, rate: float, servers: int, positions: int | None
) -> list[Requests]:
    """The requests of each server that is simulated; together they stand for all.

    Drawn ones are those of one server, which gets its part of the rate: requests that go to
    servers at random stay Poisson. A trace is stretched to the rate and dealt in turn, as far as
    there are requests. Equal seeds draw equal requests, closer together at a higher rate.
    """
    if sampling.trace is not None:
        return _dealt(sampling.trace, sampling.count, rate, servers)
    most = positions or MOST_TOKENS
    generator = np.random.default_rng(sampling.seed)
    drawn = poisson_requests(
        1.0,
        sampling.count,
        _lengths(traffic.prompt_tokens, sampling.variation, most - 1),
        _lengths(traffic.output_tokens, sampling.variation, most - 1),
        generator,
    )
    return [
        dataclasses.replace(
            drawn,
            arrival_s=drawn.arrival_s * servers / rate,
            # Where a model's window is full, the answer ends.
            output_tokens=np.minimum(drawn.output_tokens, most - drawn.prompt_tokens),
        )
    ]


def _lengths(mean: float, variation: float, most: int) -> LognormalLength:
    return LognormalLength(mean_tokens=mean, variation=variation, most_tokens=most)


def _dealt(trace: Requests, count: int, rate: float, servers: int) -> list[Requests]:
    stretch = trace.rate_per_s / rate
    times = (trace.arrival_s[:count] - trace.arrival_s[0]) * stretch
    return [
        Requests(
            arrival_s=times[server::servers],
            prompt_tokens=trace.prompt_tokens[:count][server::servers],
            output_tokens=trace.output_tokens[:count][server::servers],
        )
        for server in range(min(servers, count))
    ]


def check_window(sampling: Sampling, name: str, positions: int | None) -> None:
    """Raise InputError for a request of the trace that is longer than the model's window."""
    if sampling.trace is None or positions is None:
        return
    whole = (sampling.trace.prompt_tokens + sampling.trace.output_tokens)[: sampling.count]
    longest = int(np.argmax(whole))
    if whole[longest] > positions:
        raise InputError(
            f"request {longest + 1} of the trace has {whole[longest]} tokens, {name} holds"
            f" {positions}",
            hint="Leave such requests out of the trace, or choose another model",
        )
