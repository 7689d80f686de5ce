"""Traffic of a server: its means, a recorded trace, or randomly drawn requests."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np

from costmodel.errors import InputError
from costmodel.io import number_of, read_table
from costmodel.statistics import Array, Ints

COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens")
# Longer than any context window: a larger number is a mistake, and sums of a million fit in int64.
MOST_TOKENS = 100_000_000
# Requests of one server that are simulated unless a number is given.
REQUESTS = 2000
# Percentiles of fewer requests are too noisy to be stated.
LEAST_REQUESTS = 100
# Standard deviation of lengths over their mean unless it is given: between equal lengths (0) and
# exponentially distributed ones (1).
VARIATION = 0.7


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Mean tokens of a request."""

    prompt_tokens: float
    output_tokens: float

    @property
    def total_tokens(self) -> float:
        return self.prompt_tokens + self.output_tokens


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """Requests in the order of arrival, recorded or drawn: each [requests], at least one."""

    arrival_s: Array
    prompt_tokens: Ints
    output_tokens: Ints

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def rate_per_s(self) -> float:
        """Mean arrivals a second between the first and the last arrival."""
        span_s = float(self.arrival_s[-1] - self.arrival_s[0])
        return (len(self) - 1) / span_s if span_s > 0 else math.inf

    @property
    def means(self) -> Traffic:
        return Traffic(
            prompt_tokens=float(self.prompt_tokens.mean()),
            output_tokens=float(self.output_tokens.mean()),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    """The requests of a simulation: their number and origin.

    Without a trace, one server gets `requests` requests: Poisson arrivals and log-normal lengths
    whose standard deviation is `variation` times their mean. With a trace, its first `requests`
    requests are dealt to all servers (None: the whole trace).
    """

    requests: int | None = None
    seed: int = 0
    variation: float = VARIATION
    trace: Trace | None = None

    @property
    def count(self) -> int:
        if self.trace is None:
            return self.requests or REQUESTS
        return min(self.requests or len(self.trace), len(self.trace))

    def describe(self) -> str:
        if self.trace is not None:
            return f"{self.count} requests of the trace, dealt to the servers in turn"
        return (
            f"{self.count} requests of one server, Poisson arrivals, log-normal lengths with a"
            f" standard deviation of {self.variation:g} x the mean, seed {self.seed}"
        )

    def check_window(self, target: str, positions: int | None) -> None:
        """Raise InputError for a request of the trace longer than the target's `positions`."""
        if self.trace is None or positions is None:
            return
        tokens = (self.trace.prompt_tokens + self.trace.output_tokens)[: self.count]
        longest = int(np.argmax(tokens))
        if tokens[longest] > positions:
            raise InputError(
                f"request {longest + 1} of the trace has {tokens[longest]} tokens, {target} holds"
                f" {positions}",
                hint="Leave such requests out of the trace, or choose another model",
            )

    def check(self) -> None:
        """Raise InputError for settings that cannot be simulated."""
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
        if not 0 <= self.variation < math.inf:
            raise InputError(f"the variation of lengths must be 0 or more (is {self.variation:g})")


def poisson_trace(
    rate_per_s: float,
    count: int,
    means: Traffic,
    generator: np.random.Generator,
    *,
    variation: float = 0.0,
    most_tokens: int = MOST_TOKENS,
) -> Trace:
    """Requests at random, with log-normal lengths in whole tokens that are cut to `most_tokens`.

    means      before the cut
    variation  standard deviation of lengths over their mean; 0: one length for all requests
    """
    variance = math.log1p(variation**2)

    def lengths(mean_tokens: float) -> Ints:
        middle = math.log(mean_tokens) - variance / 2
        drawn = generator.lognormal(middle, math.sqrt(variance), count)
        return np.clip(np.rint(drawn), 1, most_tokens).astype(np.int64)

    return Trace(
        arrival_s=np.cumsum(generator.exponential(1 / rate_per_s, count)),
        prompt_tokens=lengths(means.prompt_tokens),
        output_tokens=lengths(means.output_tokens),
    )


def read_trace(path: Path) -> Trace:
    """A trace from a CSV file with the columns of COLUMNS, in any order; others are ignored.

    Raises InputError with the line and the field that is wrong.
    """
    hint = f"The first line must name {','.join(COLUMNS)}"
    values: dict[str, list[float]] = {name: [] for name in COLUMNS}
    for place, line in read_table(path, COLUMNS, hint=hint)[1]:
        for name in COLUMNS:
            value, shown = number_of(line[name], place, name), line[name]
            if name == "arrival_s":
                if value < 0:
                    raise InputError(f"{place}: arrival_s must be 0 or later (is {shown})")
            elif not 1 <= value <= MOST_TOKENS or value != int(value):
                raise InputError(
                    f"{place}: {name} must be a whole number from 1 to {MOST_TOKENS} (is {shown})"
                )
            values[name].append(value)
        times = values["arrival_s"]
        if len(times) > 1 and times[-1] < times[-2]:
            raise InputError(
                f"{place}: arrival_s falls from {times[-2]:g} to {times[-1]:g}",
                hint="Sort the lines by arrival_s",
            )
    if not values["arrival_s"]:
        raise InputError(f"{path}: there are no requests below the header")
    arrival_s, prompt, output = (np.array(values[name]) for name in COLUMNS)
    return Trace(
        arrival_s=arrival_s,
        prompt_tokens=prompt.astype(np.int64),
        output_tokens=output.astype(np.int64),
    )
