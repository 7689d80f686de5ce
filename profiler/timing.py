"""Timers, and the samples they give.

A timer gives the seconds of one call; an accumulator holds the samples of one point under a
stopping rule, so that a sweep can take one sample of a point at a time and mix the points: a
drift of the machine then spreads over all of them instead of looking like a trend.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Protocol, TypeVar

import numpy as np

from costmodel.errors import MeasurementError
from profiler.robust import mad_s, median_interval_s, relative_error, warmup_length
from profiler.stopping import LIMIT, StoppingRule, Verdict

Item = TypeVar("Item")


class Timer(Protocol):
    """Times calls on one device, and tells the time for budgets."""

    def time_s(self, function: Callable[[], object]) -> float:
        """Seconds of one call of `function`, until its work on the device is done."""
        ...

    def now_s(self) -> float:
        """A monotonic clock."""
        ...


class WallTimer:
    """`time.perf_counter` around the call, with the garbage collector held off."""

    def time_s(self, function: Callable[[], object]) -> float:
        collecting = gc.isenabled()
        gc.disable()
        try:
            start_s = time.perf_counter()
            function()
            return time.perf_counter() - start_s
        finally:
            if collecting:
                gc.enable()

    def now_s(self) -> float:
        return time.perf_counter()


class FakeTimer:
    """A timer whose durations are given: for tests and dry runs.

    `durations_s` is an iterable, or a function of the timed function. The clock advances by
    each duration. An exhausted iterable raises `MeasurementError`.
    """

    def __init__(
        self, durations_s: Iterable[float] | Callable[[Callable[[], object]], float]
    ) -> None:
        self._duration_of = durations_s if callable(durations_s) else None
        self._durations_s = iter(()) if callable(durations_s) else iter(durations_s)
        self._now_s = 0.0

    def time_s(self, function: Callable[[], object]) -> float:
        function()
        if self._duration_of is not None:
            duration_s = self._duration_of(function)
        else:
            following = next(self._durations_s, None)
            if following is None:
                raise MeasurementError("the fake timer has no duration left")
            duration_s = following
        self._now_s += duration_s
        return duration_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass without a call."""
        self._now_s += seconds


class Guard(Protocol):
    """Says whether a sample was disturbed (throttled clocks, stolen processor time)."""

    def start(self) -> None:
        """Called just before a sample."""
        ...

    def disturbance(self) -> str:
        """What disturbed the sample since `start`; empty when it is clean."""
        ...

    def summary(self) -> dict[str, Any]:
        """What it saw of the device over all samples, in the fields of the metadata."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Seconds of one call, and what disturbed it (empty: nothing)."""

    seconds: float
    disturbance: str = ""


def take_sample(function: Callable[[], object], timer: Timer, guard: Guard | None = None) -> Sample:
    """Time one call under an optional guard."""
    if guard is None:
        return Sample(seconds=timer.time_s(function))
    guard.start()
    seconds = timer.time_s(function)
    return Sample(seconds=seconds, disturbance=guard.disturbance())


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The samples of one point, raw, in the order taken, split into what counts and what not."""

    seconds: tuple[float, ...]
    warmup: tuple[float, ...] = ()
    rejected: tuple[float, ...] = ()
    reason: str = LIMIT
    unmet: str = ""

    @property
    def n(self) -> int:
        return len(self.seconds)

    @property
    def median_s(self) -> float:
        return median(self.seconds)

    @property
    def mad_s(self) -> float | None:
        """Median absolute deviation; None below three samples."""
        return mad_s(self.seconds)

    @property
    def interval_s(self) -> tuple[float, float] | None:
        """95 % interval of the median from order statistics; None below six samples."""
        return median_interval_s(self.seconds)

    @property
    def relative_error(self) -> float | None:
        """Standard error of the median over the median; None below three samples."""
        return relative_error(self.seconds)

    def to_record(self) -> dict[str, Any]:
        """A mapping of JSON values, for a journal or a sidecar of raw samples."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Samples:
        """The inverse of `to_record`."""
        lists = ("seconds", "warmup", "rejected")
        return cls(
            **{name: tuple(record[name]) for name in lists},
            reason=record["reason"],
            unmet=record["unmet"],
        )


class PointAccumulator:
    """The samples of one point under a stopping rule, added one at a time."""

    def __init__(self, rule: StoppingRule) -> None:
        self.rule = rule
        self._accepted: list[float] = []
        self._rejected: list[float] = []
        self._verdict = Verdict(done=False)

    def add(self, seconds: float, ok: bool = True) -> None:
        """Add one sample; `ok=False` keeps it aside as disturbed."""
        if not seconds > 0:
            raise MeasurementError(f"a timer gave {seconds} s for a call")
        (self._accepted if ok else self._rejected).append(seconds)
        cut = warmup_length(self._accepted)
        still_falling = cut > 0 and cut == len(self._accepted) // 2
        self._verdict = self.rule.check(
            () if still_falling else self._accepted[cut:],
            attempts=self.attempts,
            spent_s=sum(self._accepted) + sum(self._rejected),
        )

    @property
    def attempts(self) -> int:
        return len(self._accepted) + len(self._rejected)

    @property
    def done(self) -> bool:
        return self._verdict.done

    @property
    def reason(self) -> str:
        return self._verdict.reason

    @property
    def unmet(self) -> str:
        """The condition that is not met, in words; empty when all are."""
        return self._verdict.unmet

    @property
    def samples(self) -> Samples:
        """What was measured so far; `MeasurementError` when no sample was accepted."""
        if not self._accepted:
            raise MeasurementError(
                f"none of {self.attempts} samples could be used: all were disturbed",
                hint="Stop other work on this machine, let it cool down, and run again.",
            )
        cut = warmup_length(self._accepted)
        return Samples(
            seconds=tuple(self._accepted[cut:]),
            warmup=tuple(self._accepted[:cut]),
            rejected=tuple(self._rejected),
            reason=self._verdict.reason,
            unmet=self._verdict.unmet,
        )


def measure(
    function: Callable[[], object],
    *,
    timer: Timer,
    rule: StoppingRule,
    guard: Guard | None = None,
) -> Samples:
    """Time `function` until `rule` stops; `MeasurementError` when no sample was accepted."""
    point = PointAccumulator(rule)
    while not point.done:
        sample = take_sample(function, timer, guard)
        point.add(sample.seconds, ok=not sample.disturbance)
    return point.samples


def interleave(
    waiting: Callable[[], Sequence[Item]], generator: np.random.Generator
) -> Iterator[Item]:
    """Yield what `waiting` names, in passes, each pass in a fresh random order.

    The caller adds one sample to each point that it is given; `waiting` is asked again
    before every pass, and the iteration ends when it names none.
    """
    while items := waiting():
        for position in generator.permutation(len(items)):
            yield items[position]
