"""How long forwards took, noted without waiting for the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch


@dataclass(frozen=True, slots=True)
class Forward:
    """The verification forward that was timed, in the terms of the cost model."""

    rows: float
    context: int
    batch: int


class Stopwatch(Protocol):
    """Times one forward after another."""

    def start(self) -> None:
        """Begin here; a beginning without an end is forgotten."""

    def stop(self, forward: Forward) -> None:
        """End here; `forward` is what was run since the beginning."""

    def finished(self) -> list[tuple[Forward, float]]:
        """Forwards and their seconds, in order, each once and only when it is known."""


class HostStopwatch:
    """For devices whose work is done when the call returns."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._start_s = 0.0
        self._finished: list[tuple[Forward, float]] = []

    def start(self) -> None:
        self._start_s = self._clock()

    def stop(self, forward: Forward) -> None:
        self._finished.append((forward, self._clock() - self._start_s))

    def finished(self) -> list[tuple[Forward, float]]:
        done, self._finished = self._finished, []
        return done


class EventStopwatch:
    """For CUDA: events in the stream, read once the device has passed them.

    The copy of accepted tokens waits for the forward in any case, so that its time is known
    after it in the same round, or, should it not be, a round later.
    """

    def __init__(self, make_event: Callable[[], Any]) -> None:
        """make_event: a new `torch.cuda.Event` with timing."""
        self._make_event = make_event
        self._start: Any = None
        self._waiting: deque[tuple[Forward, Any, Any]] = deque()

    def start(self) -> None:
        self._start = self._make_event()
        self._start.record()

    def stop(self, forward: Forward) -> None:
        end = self._make_event()
        end.record()
        self._waiting.append((forward, self._start, end))

    def finished(self) -> list[tuple[Forward, float]]:
        done = []
        while self._waiting and self._waiting[0][2].query():
            forward, start, end = self._waiting.popleft()
            done.append((forward, start.elapsed_time(end) / 1e3))  # it gives milliseconds
        return done


def stopwatch_for(device: torch.device) -> Stopwatch:
    """Events on CUDA, the host's clock elsewhere."""
    if device.type == "cuda":
        return EventStopwatch(lambda: torch.cuda.Event(enable_timing=True))
    return HostStopwatch()
