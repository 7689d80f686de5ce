"""The draft length with the highest expected tokens a second, step by step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from integrations.acceptance import ANY_KIND, AcceptanceByPosition
from integrations.costs import StepCosts

RATE_MEMORY = 0.97  # of tokens and seconds, a step
EXPLORED_SHARE = 0.002  # of the time, for drafts longer than the best
FREE_SHARE = 0.005  # of a plain step, below which the cost of a draft is not weighed
LEAST_GAIN = 0.01  # by which drafts must pay, as a share of a plain step


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningSequence:
    """A sequence before a step: its name, cached tokens, the draft at hand and the draft's kind."""

    name: str
    context: int
    draft: Sequence[int] = ()
    kind: int = ANY_KIND


class RunningRate:
    """Tokens a second of the recent steps of one batch size, by predicted seconds."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def observe(self, tokens: float, seconds: float) -> None:
        self._tokens = RATE_MEMORY * self._tokens + tokens
        self._seconds = RATE_MEMORY * self._seconds + seconds

    def tokens_per_s(self, plain: float) -> float:
        """The rate, but at least that of plain steps."""
        return max(self._tokens / self._seconds, plain) if self._seconds > 0 else plain


class DraftPolicy:
    """Chooses how many tokens to draft, and how many drafted ones to verify.

    A token is worth what the recent steps gave for a second: a longer step is worth while as long
    as its expected tokens exceed its seconds times that rate. That gives the highest rate in the
    long run, also where only some steps have drafts.
    """

    def __init__(self, costs: StepCosts, allowed: Sequence[int], *, shortens: bool) -> None:
        """
        allowed   draft lengths that the engine can run; 0 always is one
        shortens  whether drafts can be cut before they are verified
        """
        self.costs = costs
        self.shortens = shortens
        self._allowed = sorted({0, *allowed})
        self.longest = self._allowed[-1]
        self.acceptance = AcceptanceByPosition(self.longest)
        self._available: dict[int, float] = {}
        self._rates: dict[int, RunningRate] = {}
        self._credit_s = 0.0
        self._asked = False  # whether the drafts at hand were asked for

    def verified(self, sequences: Sequence[RunningSequence]) -> list[int]:
        """How many of its drafted tokens each sequence should verify now."""
        if not sequences:
            return []
        drafted = [min(len(sequence.draft), self.longest) for sequence in sequences]
        if self._asked:
            self._note_available(drafted)
        total = sum(drafted)
        if total == 0:
            return drafted
        chances = [
            self.acceptance.survival(one.name, one.kind)[:count]
            for one, count in zip(sequences, drafted, strict=True)
        ]
        gains = sorted(chain.from_iterable(chances), reverse=True)
        batch, context = len(sequences), mean_context(sequences)
        rest_s = self.costs.gap_s + self.costs.draft_s(batch, context, self.longest)[0]
        verify_s = self.costs.verify_s(batch, context, batch * self.longest)
        step_s = [seconds + rest_s for seconds in verify_s[: total + 1]]
        chosen = self._best(batch, accumulate(gains, initial=0.0), step_s)
        if chosen == 0:
            return [0] * batch
        least = gains[chosen - 1]
        return [sum(chance >= least for chance in one) for one in chances]

    def draft_length(self, sequences: Sequence[RunningSequence]) -> int:
        """How many tokens to draft for the next step: the same number for all sequences."""
        length = self._draft_length(sequences)
        self._asked = length > 0
        return length

    def _draft_length(self, sequences: Sequence[RunningSequence]) -> int:
        batch = len(sequences)
        if batch == 0:
            return 0
        context = mean_context(sequences)
        verify_s = self.costs.verify_s(batch, context, batch * self.longest)
        every_draft_s = self.costs.draft_s(batch, context, self.longest)
        draft_s = [every_draft_s[length] for length in self._allowed]
        if self.shortens and draft_s[-1] - min(draft_s) <= FREE_SHARE * verify_s[0]:
            return self.longest  # what it costs is less than a choice is worth
        share = self._available.get(batch, 1.0)
        gains = self._expected_gains(sequences)
        step_s = [
            verify_s[round(share * batch * length)] + self.costs.gap_s for length in self._allowed
        ]
        total_s = [verify + draft for verify, draft in zip(step_s, draft_s, strict=True)]
        best = self._best(batch, [share * gains[length] for length in self._allowed], total_s)
        at_stake_s = draft_s if self.shortens else total_s
        extra_s = at_stake_s[-1] - at_stake_s[best]
        self._credit_s += EXPLORED_SHARE * step_s[best]
        if extra_s <= self._credit_s:
            self._credit_s = min(self._credit_s - max(extra_s, 0.0), step_s[0])
            return self.longest
        return self._allowed[best]

    def _expected_gains(self, sequences: Sequence[RunningSequence]) -> list[float]:
        """Tokens that a draft of 0 .. `longest` tokens each is expected to win in all."""
        chances = (self.acceptance.survival(one.name) for one in sequences)
        return list(accumulate(map(sum, zip(*chances, strict=True)), initial=0.0))

    def predicted_s(self, sequences: Sequence[RunningSequence], rows: int, drafted: int) -> float:
        """Seconds of a step over `rows` draft tokens in all that then drafts `drafted` tokens."""
        batch, context = len(sequences), mean_context(sequences)
        verify_s = self.costs.verify_s(batch, context, batch * self.longest)
        draft_s = self.costs.draft_s(batch, context, self.longest)
        return verify_s[min(rows, len(verify_s) - 1)] + draft_s[min(drafted, self.longest)]

    def observe_step(self, batch: int, tokens: int, predicted_s: float) -> None:
        """Learn what the steps of this batch size give."""
        self._rates.setdefault(batch, RunningRate()).observe(tokens, predicted_s + self.costs.gap_s)

    def _best(self, batch: int, gains: Iterable[float], step_s: Sequence[float]) -> int:
        """The index with the most expected tokens beyond what its seconds usually give."""
        plain = batch / step_s[0]
        running = self._rates.get(batch)
        rate = plain if running is None else running.tokens_per_s(plain)
        best, most = 0, LEAST_GAIN * batch
        for index, (gain, seconds) in enumerate(zip(gains, step_s, strict=True)):
            worth = gain - rate * (seconds - step_s[0])
            if worth > most:
                best, most = index, worth
        return best

    def _note_available(self, drafted: Sequence[int]) -> None:
        """Learn which share of the sequences has a draft, where one was asked for."""
        batch = len(drafted)
        share = sum(count > 0 for count in drafted) / batch
        before = self._available.get(batch, 1.0)
        self._available[batch] = before + 0.02 * (share - before)


def mean_context(sequences: Sequence[RunningSequence]) -> float:
    """The mean of cached tokens."""
    return sum(sequence.context for sequence in sequences) / len(sequences)
