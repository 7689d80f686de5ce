"""The draft length with the highest expected tokens a second, step by step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from integrations.draft_lengths.acceptance import ANY_KIND, AcceptanceByPosition
from integrations.draft_lengths.costs import StepCosts

RATE_MEMORY = 0.97  # of tokens and seconds, a step
EXPLORED_SHARE = 0.003  # of the time, that may be lost on drafts longer than the best
FREE_SHARE = 0.005  # of a plain step, below which the cost of a draft is not weighed
LEAST_GAIN = 0.01  # by which drafts must pay, as a share of a plain step


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningSequence:
    """A sequence before a step: its name, cached tokens, the draft at hand and the draft's kind."""

    name: str
    context: int
    draft: Sequence[int] = ()
    kind: int = ANY_KIND


class RunningGain:
    """Tokens of the recent steps of one batch size over those of plain steps in the same time.

    Times are predicted ones. A ratio outlasts a change of the context, which a rate does not.
    """

    def __init__(self) -> None:
        self._tokens = self._plain_tokens = 0.0

    def observe(self, tokens: float, plain_tokens: float) -> None:
        self._tokens = RATE_MEMORY * self._tokens + tokens
        self._plain_tokens = RATE_MEMORY * self._plain_tokens + plain_tokens

    def over_plain(self) -> float:
        """The ratio, but at least 1."""
        return max(self._tokens / self._plain_tokens, 1.0) if self._plain_tokens > 0 else 1.0


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
        self._gains: dict[int, RunningGain] = {}
        self._credit_s = 0.0
        self._asked = False  # whether the drafts at hand were asked for

    def verified(self, sequences: Sequence[RunningSequence]) -> list[int]:
        """How many of its drafted tokens each sequence should verify now."""
        if not sequences:
            return []
        drafted = [min(len(sequence.draft), self.longest) for sequence in sequences]
        batch, total = len(sequences), sum(drafted)
        if self._asked:  # learn which share of the sequences has a draft then
            before = self._available.get(batch, 1.0)
            share = sum(count > 0 for count in drafted) / batch
            self._available[batch] = before + 0.02 * (share - before)
        if total == 0:
            return drafted
        chances = [
            self.acceptance.survival(one.name, one.kind)[:count]
            for one, count in zip(sequences, drafted, strict=True)
        ]
        gains = sorted(chain.from_iterable(chances), reverse=True)
        context = mean_context(sequences)
        rest_s = self.costs.gap_s + self.costs.draft_s(batch, context, self.longest)[0]
        verify_s = self.costs.verify_s(batch, context, batch * self.longest)
        step_s = [seconds + rest_s for seconds in verify_s[: total + 1]]
        worths = _worths(accumulate(gains, initial=0.0), step_s, self._rate(batch, step_s[0]))
        chosen = _best(worths, LEAST_GAIN * batch)
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
        chances = (self.acceptance.survival(one.name) for one in sequences)
        gains = list(accumulate(map(sum, zip(*chances, strict=True)), initial=0.0))  # by length
        step_s = [
            verify_s[round(share * batch * length)] + self.costs.gap_s for length in self._allowed
        ]
        total_s = [verify + draft for verify, draft in zip(step_s, draft_s, strict=True)]
        rate = self._rate(batch, total_s[0])
        worths = _worths([share * gains[length] for length in self._allowed], total_s, rate)
        best = _best(worths, LEAST_GAIN * batch)
        self._credit_s = min(self._credit_s + EXPLORED_SHARE * step_s[best], step_s[0])
        if best + 1 == len(self._allowed):
            return self.longest
        # One length more is tried, so that what comes after the best is found step by step.
        lost_s = (worths[best] - worths[best + 1]) / rate
        if self.shortens:  # what need not be verified costs no more than its draft
            lost_s = min(lost_s, draft_s[best + 1] - draft_s[best])
        if lost_s > self._credit_s:
            return self._allowed[best]
        self._credit_s -= max(lost_s, 0.0)
        return self._allowed[best + 1]

    def predicted_s(self, sequences: Sequence[RunningSequence], rows: int, drafted: int) -> float:
        """Seconds of a step over `rows` draft tokens in all that then drafts `drafted` tokens."""
        batch, context = len(sequences), mean_context(sequences)
        verify_s = self.costs.verify_s(batch, context, batch * self.longest)
        draft_s = self.costs.draft_s(batch, context, self.longest)
        return verify_s[min(rows, len(verify_s) - 1)] + draft_s[min(drafted, self.longest)]

    def observe_step(self, batch: int, context: float, tokens: int, predicted_s: float) -> None:
        """Learn what the steps of this batch size give over plain ones."""
        plain_s = self.costs.verify_s(batch, context, batch * self.longest)[0]
        plain_s += self.costs.draft_s(batch, context, self.longest)[0]
        plain_tokens = batch * (predicted_s + self.costs.gap_s) / (plain_s + self.costs.gap_s)
        self._gains.setdefault(batch, RunningGain()).observe(tokens, plain_tokens)

    def _rate(self, batch: int, plain_s: float) -> float:
        """Tokens a second that a step's time is usually worth, of plain steps at least."""
        running = self._gains.get(batch)
        return batch / plain_s * (1.0 if running is None else running.over_plain())


def mean_context(sequences: Sequence[RunningSequence]) -> float:
    """The mean of cached tokens."""
    return sum(sequence.context for sequence in sequences) / len(sequences)


def _worths(gains: Iterable[float], step_s: Sequence[float], rate: float) -> list[float]:
    """Expected tokens beyond what the seconds beyond a plain step's usually give."""
    return [
        gain - rate * (seconds - step_s[0]) for gain, seconds in zip(gains, step_s, strict=True)
    ]


def _best(worths: Sequence[float], least: float) -> int:
    """The index of the highest worth; 0 where none exceeds `least`."""
    best = max(range(len(worths)), key=worths.__getitem__)
    return best if worths[best] > least else 0
