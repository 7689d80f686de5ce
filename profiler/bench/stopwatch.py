"""Times one response and counts its tokens, the same way for every arm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from costmodel.errors import MeasurementError
from profiler.bench.contender import Decoding, SteppedDecoding, UpdatingDecoding
from profiler.bench.record import Finish, Update

Clock = Callable[[], float]
_DIGITS = 7  # of seconds: a clock's own noise is larger


class Stopwatch:
    """Takes the tokens of one text until it ends; what comes after does not count.

    A text ends with the first end token, which counts, or after `new_tokens`. Time runs from
    `time` until the last token that counts was handed over.
    """

    def __init__(self, clock: Clock, new_tokens: int, ends: frozenset[int]) -> None:
        self.tokens: list[int] = []
        self.first_tokens = 0
        self.finish: Finish | None = None
        self._clock, self._new_tokens, self._ends = clock, new_tokens, ends
        self._start_s = self._first_s = self._last_s = 0.0
        self._away_s = 0.0  # between rounds, while other arms ran theirs

    @property
    def first_token_s(self) -> float:
        return round(self._first_s - self._start_s, _DIGITS)

    @property
    def total_s(self) -> float:
        return round(self._last_s - self._start_s, _DIGITS)

    def time(self, decoding: Decoding) -> None:
        """Run the decoding to its end. Raises MeasurementError where it stops before."""
        self._start_s = self._clock()
        decoding.run(self.put)
        self._check_ended()

    def time_steps(self, decoding: SteppedDecoding) -> Iterator[None]:
        """The same, a round at each `next`; what passes between two of them does not count."""
        self._start_s = self._clock()
        for _ in decoding.steps(self.put):
            left_s = self._clock()
            yield
            self._away_s += self._clock() - left_s
        self._check_ended()

    def _check_ended(self) -> None:
        if self.finish is None:
            raise MeasurementError(
                f"the text ended after {len(self.tokens)} of {self._new_tokens} tokens without an"
                " end token"
            )

    def update(self, decoding: Decoding) -> Update | None:
        """What the arm does with its drafter now, by this clock; None where it stays as it is."""
        if not isinstance(decoding, UpdatingDecoding):
            return None
        start_s = self._clock()
        found = decoding.update()
        return replace(found, seconds=round(self._clock() - start_s, _DIGITS))

    def put(self, tokens: Sequence[int]) -> bool:
        """Take tokens that are known now; false once the text has ended."""
        if self.finish is not None or not tokens:
            return self.finish is None
        now_s, first = self._clock() - self._away_s, not self.tokens
        for token in tokens:
            self.tokens.append(token)
            if token in self._ends:
                self.finish = "eos"
            elif len(self.tokens) == self._new_tokens:
                self.finish = "length"
            if self.finish is not None:
                break
        self._last_s = now_s
        if first:
            self._first_s, self.first_tokens = now_s, len(self.tokens)
        return self.finish is None


class MemoryGauge(Protocol):
    """Watches the peak of memory from `start` on."""

    def start(self) -> None: ...

    def peak_bytes(self) -> int | None: ...


class NoGauge:
    """Where the peak is not known."""

    def start(self) -> None:
        return

    def peak_bytes(self) -> int | None:
        return None


class CudaGauge:
    """The peak of torch's allocator on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int | None:
        return int(torch.cuda.max_memory_allocated(self._device))


class ProcessGauge:
    """The peak of this process's resident memory, which Linux can be told to count anew."""

    RESET, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")

    def __init__(self) -> None:
        self._works = True

    def start(self) -> None:
        try:
            self.RESET.write_text("5")
        except OSError:
            self._works = False  # the peak since the process began would say nothing of an arm

    def peak_bytes(self) -> int | None:
        if not self._works:
            return None
        for line in self.STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return None


def memory_gauge(device: torch.device) -> MemoryGauge:
    """The gauge of a device: its allocator's, on a CPU the process's."""
    return CudaGauge(device) if device.type == "cuda" else ProcessGauge()
