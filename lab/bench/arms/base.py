"""The arms as the harness sees them.

Only the harness reads the clock and counts tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from costmodel.errors import MeasurementError
from lab.bench.record import Arm, Rounds, Update

# Takes tokens as they come; returns false once no more are wanted.
Put = Callable[[Sequence[int]], bool]


class PeerFailure(MeasurementError):
    """An engine that ended or does not answer; the run goes on without its arm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """What an arm reports of a text after the clock has stopped.

    text  token ids in place of those that were put; None where those are the text's
    """

    text: tuple[int, ...] | None = None
    rounds: Rounds | None = None
    stages: dict[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


class ArmDecoding:
    """One text about to be decoded.

    pauses  whether other arms may run their rounds between this one's
    """

    pauses = False

    def steps(self, put: Put) -> Iterator[None]:
        """Decode, a round at each `next`, the prefill first; pass tokens to `put` once known.

        Time inside counts, and no other.
        """
        raise NotImplementedError

    def details(self) -> Details:
        """Rounds, stages and warnings of the text. Not timed."""
        return Details()

    def rehearse(self) -> None:
        """After the warm-up's text: set updates up without learning. Not timed."""

    def update(self) -> Update | None:
        """Learn after a text; the harness times it and sets `seconds`. None: nothing to learn."""
        return None


class ArmRunner:
    """One arm with its models loaded.

    largest_tree  most rows of a forward beyond the text
    """

    arm: Arm
    largest_tree = 1

    def prepare(self, tokens: int) -> None:
        """Set up once, for texts of up to `tokens` tokens with a largest tree."""

    def start(self, ids: Sequence[int], new_tokens: int, seed: int) -> ArmDecoding:
        """A text to decode. Work that every text costs belongs into `ArmDecoding.steps`."""
        raise NotImplementedError
