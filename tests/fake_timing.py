"""A timer with given durations, and a stopping rule that counts samples."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random

import pytest

from costmodel.errors import MeasurementError
from decoder.statistics import HostTimer


def even_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock for the decoder by which any forward takes a millisecond, give or take 1 %."""
    random = Random(0)
    readings_s = itertools.accumulate(random.gauss(1e-3, 1e-5) for _ in itertools.count())

    def clock() -> float:
        return next(readings_s)

    for module in ("decode_loop", "profiling.measured_profile", "profiling.probe", "statistics"):
        monkeypatch.setattr(f"decoder.{module}.perf_counter", clock)
    monkeypatch.setattr(HostTimer.__init__, "__defaults__", (clock,))


class FakeTimer:
    """A timer with given durations.

    `durations_s` is an iterable, or a function of the timed function. The clock advances by
    each duration. An exhausted iterable raises MeasurementError.
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
            next_s = next(self._durations_s, None)
            if next_s is None:
                raise MeasurementError("the fake timer has no duration left")
            duration_s = next_s
        self._now_s += duration_s
        return duration_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass without a call."""
        self._now_s += seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CountRule:
    """Stop after `samples` accepted samples, or after `max_attempts` in all."""

    samples: int
    max_attempts: int | None = None

    def stops(self, seconds: Sequence[float], *, attempts: int, spent_s: float) -> bool:
        most = 3 * self.samples if self.max_attempts is None else self.max_attempts
        return len(seconds) >= self.samples or attempts >= most
