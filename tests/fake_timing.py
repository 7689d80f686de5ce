"""A timer with given durations, and a stopping rule that counts samples."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import pytest


def even_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock for the decoder by which any forward takes a millisecond, give or take 1 %."""
    random = Random(0)
    readings_s = itertools.accumulate(random.gauss(1e-3, 1e-5) for _ in itertools.count())

    def clock() -> float:
        return next(readings_s)

    for module in ("decode_loop", "device", "profiling.probe", "statistics"):
        monkeypatch.setattr(f"decoder.{module}.perf_counter", clock)


class FakeTimer:
    """A timer with given durations, a function of what is timed; its clock advances by them."""

    def __init__(self, duration_of: Callable[[Callable[[], object]], float]) -> None:
        self._duration_of, self._now_s = duration_of, 0.0

    def time_s(self, function: Callable[[], object]) -> float:
        function()
        duration_s = self._duration_of(function)
        self._now_s += duration_s
        return duration_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CountRule:
    """Stop after `samples` accepted samples, or after three times as many in all."""

    samples: int

    def stops(self, seconds: Sequence[float], *, attempts: int, spent_s: float) -> bool:
        return len(seconds) >= self.samples or attempts >= 3 * self.samples
