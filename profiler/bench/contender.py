"""What an arm is to the harness, which alone holds the clock and counts the tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from profiler.bench.record import Arm, Rounds, Update

# Takes tokens as they come; false once no more are wanted.
Put = Callable[[Sequence[int]], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """What only the arm itself can tell of a text, asked for after the clock has stopped."""

    rounds: Rounds | None = None
    stages: dict[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


class Decoding(Protocol):
    """One text about to be decoded."""

    def run(self, put: Put) -> None:
        """Decode, handing over tokens as soon as they are known. Everything here is timed."""

    def details(self) -> Details:
        """What happened. Not timed."""


@runtime_checkable
class SteppedDecoding(Decoding, Protocol):
    """A text that can wait behind each round, while other arms run theirs."""

    def steps(self, put: Put) -> Iterator[None]:
        """`run`, a round at each `next`, the prefill first. Everything within one is timed."""


@runtime_checkable
class UpdatingDecoding(Decoding, Protocol):
    """What a text also has where its arm learns from it before the next one."""

    def rehearse(self) -> None:
        """Behind the warm-up's text: set up what updates need, learn nothing. Not timed."""

    def update(self) -> Update:
        """Behind every other text. Timed by the harness, which sets `seconds`."""


class Contender(Protocol):
    """One arm, its models loaded."""

    arm: Arm
    largest_tree: int  # rows that a forward may have beyond the text

    def prepare(self, tokens: int) -> None:
        """Set up once, for texts of up to so many tokens and a largest tree."""

    def start(self, ids: Sequence[int], new_tokens: int, seed: int) -> Decoding:
        """A text to decode; what a run pays for every text belongs into `Decoding.run`."""
