"""Timing samples of one point, collected under a stopping rule, one at a time.

An accumulator takes one sample at a time, so that a sweep can mix its points. A drift of the
machine then spreads over all points and does not look like a trend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import numpy as np

from costmodel.errors import MeasurementError
from costmodel.statistics import MAD_TO_SIGMA, mad_s, median_interval_s, relative_error
from profiler.measure.guards import Guard
from profiler.measure.stopping import LIMIT, StoppingRule, Verdict
from profiler.measure.timers import Timer

Item = TypeVar("Item")
Key = TypeVar("Key")

WARMUP_SIGMAS = 4.0
WARMUP_SHARE = 0.03


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
    """The raw samples of one point in the order taken: accepted, warm-up and rejected.

    reason  why the stopping rule ended the measurement
    unmet   the condition that it did not reach; empty when it reached all
    """

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


class PointAccumulator:
    """The samples of one point under a stopping rule, added one at a time."""

    def __init__(self, rule: StoppingRule) -> None:
        self.rule = rule
        self._accepted: list[float] = []
        self._rejected: list[float] = []
        self._verdict = Verdict(done=False)

    def add(self, seconds: float, ok: bool = True) -> None:
        """Add one sample; `ok=False` marks it as disturbed and rejects it."""
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
        """Samples taken, rejected ones included."""
        return len(self._accepted) + len(self._rejected)

    @property
    def done(self) -> bool:
        return self._verdict.done

    @property
    def reason(self) -> str:
        return self._verdict.reason

    @property
    def unmet(self) -> str:
        """The condition that is not met; empty when all are."""
        return self._verdict.unmet

    @property
    def samples(self) -> Samples:
        """The samples so far. Raises MeasurementError when none was accepted."""
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


def warmup_length(seconds: Sequence[float]) -> int:
    """The number of leading samples that belong to the warm-up.

    The later half is the reference. A leading sample is warm-up while it exceeds the
    reference's median by more than four standard deviations and by more than 3 %. At most
    half of the samples are cut; exactly half means that the times may still be falling.
    """
    half = len(seconds) // 2
    reference = seconds[half:]
    deviation_s = mad_s(reference)
    if deviation_s is None:
        return 0
    centre_s = median(reference)
    bound_s = centre_s + max(WARMUP_SIGMAS * MAD_TO_SIGMA * deviation_s, WARMUP_SHARE * centre_s)
    for index in range(half):
        if seconds[index] <= bound_s:
            return index
    return half


def measure(
    function: Callable[[], object],
    *,
    timer: Timer,
    rule: StoppingRule,
    guard: Guard | None = None,
) -> Samples:
    """Time `function` until `rule` stops. Raises MeasurementError when no sample was accepted."""
    point = PointAccumulator(rule)
    while not point.done:
        sample = take_sample(function, timer, guard)
        point.add(sample.seconds, ok=not sample.disturbance)
    return point.samples


def interleave(
    waiting: Callable[[], Sequence[Item]], generator: np.random.Generator
) -> Iterator[Item]:
    """Yield the items of `waiting()` in passes, each pass in a new random order.

    The caller adds one sample to each point that it receives. `waiting` is called again
    before every pass; the iteration ends when it returns nothing.
    """
    while items := waiting():
        for position in generator.permutation(len(items)):
            yield items[position]


def in_turn(
    iterators: Mapping[Key, Iterator[Item]], rotation: int = 1
) -> Iterator[tuple[Key, Item]]:
    """One item of each iterator in turn until all have ended, with the iterator's key.

    The order rotates by one place in every round, so that no iterator always follows the same
    other one. `rotation` is that of the first round.
    """
    remaining = dict(iterators)
    while remaining:
        order, first = list(remaining), rotation % len(remaining)
        for key in order[first:] + order[:first]:
            try:
                yield key, next(remaining[key])
            except StopIteration:
                del remaining[key]
        rotation += 1
