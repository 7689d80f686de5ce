"""The clock and token count of one response, the same for every arm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from costmodel.errors import MeasurementError
from lab.bench.arms.base import ArmDecoding, SteppedArmDecoding, UpdatingArmDecoding
from lab.bench.record import Finish, Update

Clock = Callable[[], float]
_DIGITS = 7  # of seconds; the clock's noise is larger


class ResponseTimer:
    """Takes the tokens of one text, and times the first and the last that count.

    A text ends with the first end token, which counts, or after `new_tokens`. Later tokens do
    not count, nor does time after the last one that does.
    """

    def __init__(self, clock: Clock, new_tokens: int, ends: frozenset[int]) -> None:
        self.tokens: list[int] = []
        self.first_tokens = 0
        self.finish: Finish | None = None
        self._clock, self._new_tokens, self._ends = clock, new_tokens, ends
        self._start_s = self._first_s = self._last_s = 0.0
        self._paused_s = 0.0  # between rounds, while other arms decoded

    @property
    def first_token_s(self) -> float:
        return round(self._first_s - self._start_s, _DIGITS)

    @property
    def total_s(self) -> float:
        return round(self._last_s - self._start_s, _DIGITS)

    def time(self, decoding: ArmDecoding) -> None:
        """Run the decoding to its end. Raises MeasurementError where it stops early."""
        self._start_s = self._clock()
        decoding.run(self.put)
        self._check_ended()

    def time_steps(self, decoding: SteppedArmDecoding) -> Iterator[None]:
        """Run the decoding one round at each `next`; the time between rounds does not count."""
        self._start_s = self._clock()
        for _ in decoding.steps(self.put):
            pause_s = self._clock()
            yield
            self._paused_s += self._clock() - pause_s
        self._check_ended()

    def _check_ended(self) -> None:
        if self.finish is None:
            raise MeasurementError(
                f"the text ended after {len(self.tokens)} of {self._new_tokens} tokens without an"
                " end token"
            )

    def update(self, decoding: ArmDecoding) -> Update | None:
        """Let the arm update its drafter, timed; None where its drafter does not learn."""
        if not isinstance(decoding, UpdatingArmDecoding):
            return None
        start_s = self._clock()
        update = decoding.update()
        return replace(update, seconds=round(self._clock() - start_s, _DIGITS))

    def put(self, tokens: Sequence[int]) -> bool:
        """Take new tokens; false once the text has ended."""
        if self.finish is not None or not tokens:
            return self.finish is None
        now_s, first = self._clock() - self._paused_s, not self.tokens
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
