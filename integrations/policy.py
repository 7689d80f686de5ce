"""The draft length with the highest expected tokens a second, step by step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from integrations.acceptance import ANY_KIND, SHARED_WEIGHT, AcceptanceByPosition
from integrations.costs import StepCosts

RATE_MEMORY = 0.97  # of tokens and seconds, a step
EXPLORED_SHARE = 0.002  # of the time, for drafts longer than the best length
FREE_SHARE = 0.005  # of a plain step, below which the cost of a draft is not weighed
KEPT_STEPS = 4  # that a draft length is kept for the same sequences; choosing takes time
KIND_MEMORY = 0.997  # of the drafts of each kind, a draft
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
        self._kept, self._kept_steps = 0, 0  # a length, and the steps that it is kept for
        self._kept_for: list[str] = []
        self._kinds: dict[int, float] = {}  # drafts of each kind, discounted

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
        batch, context = len(sequences), _mean_context(sequences)
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
        names = [one.name for one in sequences]
        if self._kept_steps == 0 or names != self._kept_for:
            self._kept_for, self._kept_steps = names, KEPT_STEPS
            self._kept = self._draft_length(sequences)
        self._kept_steps -= 1
        self._asked = self._kept > 0
        return self._kept

    def _draft_length(self, sequences: Sequence[RunningSequence]) -> int:
        batch = len(sequences)
        if batch == 0:
            return 0
        context = _mean_context(sequences)
        verify_s = self.costs.verify_s(batch, context, batch * self.longest)
        every_draft_s = self.costs.draft_s(batch, context, self.longest)
        draft_s = [every_draft_s[length] for length in self._allowed]
        if self.shortens and draft_s[-1] - min(draft_s) <= FREE_SHARE * verify_s[0]:
            return self.longest  # what it costs is less than a choice is worth
        if self.shortens:
            self._note_kinds(sequences)
        if self._kinds:
            gains, step_s = self._cut_drafts(sequences, verify_s, draft_s[0])
        else:
            share = self._available.get(batch, 1.0)
            every_gain = self._expected_gains(sequences)
            gains = [share * every_gain[length] for length in self._allowed]
            step_s = [verify_s[round(share * batch * length)] for length in self._allowed]
        gap_s = self.costs.gap_s
        total_s = [verify + draft + gap_s for verify, draft in zip(step_s, draft_s, strict=True)]
        best = self._best(batch, gains, total_s)
        at_stake_s = draft_s if self.shortens else total_s
        longer = min(best + 1, len(self._allowed) - 1)
        extra_s = at_stake_s[longer] - at_stake_s[best]
        self._credit_s += EXPLORED_SHARE * KEPT_STEPS * (step_s[best] + gap_s)
        if extra_s <= self._credit_s:
            self._credit_s = min(self._credit_s - max(extra_s, 0.0), step_s[0] + gap_s)
            self._kept_steps = 1
            return self._allowed[longer]
        return self._allowed[best]

    def _expected_gains(self, sequences: Sequence[RunningSequence]) -> list[float]:
        """Tokens that a draft of 0 .. `longest` tokens each is expected to win in all."""
        chances = (self.acceptance.survival(one.name) for one in sequences)
        return list(accumulate(map(sum, zip(*chances, strict=True)), initial=0.0))

    def _cut_drafts(
        self, sequences: Sequence[RunningSequence], verify_s: Sequence[float], rest_s: float
    ) -> tuple[list[float], list[float]]:
        """Expected tokens and seconds of verification for each allowed length of drafts to be cut.

        A draft is verified as far as its kind makes each token worth its seconds.
        """
        batch = len(sequences)
        rate = self._rate(batch, batch / (verify_s[0] + rest_s + self.costs.gap_s))
        weight = self._available.get(batch, 1.0)
        drafts = [draft for one in sequences for draft in self._likely_drafts(one.name)]
        all_gains, all_s = [0.0], [verify_s[0]]
        for length in self._allowed[1:]:
            least = rate * (verify_s[batch * length] - verify_s[0]) / (batch * length)
            gain = rows = alone_s = 0.0
            for share, chances in drafts:
                kept = [chance for chance in chances[:length] if chance > least]
                gain += share * sum(kept)
                rows += share * len(kept)
                alone_s += share * verify_s[len(kept)]
            all_gains.append(weight * gain)
            if batch > 1:
                at = int(weight * rows)
                over_s = verify_s[min(at + 1, len(verify_s) - 1)] - verify_s[at]
                all_s.append(verify_s[at] + (weight * rows - at) * over_s)
            else:
                all_s.append((1 - weight) * verify_s[0] + weight * alone_s)
        return all_gains, all_s

    def _likely_drafts(self, sequence: str) -> Iterator[tuple[float, list[float]]]:
        """The share of each kind in the sequence's drafts, and the chances of its tokens."""
        own = self.acceptance.drafts_by_kind(sequence)
        own_count, count = sum(own.values()), sum(self._kinds.values())
        for kind, drafts in self._kinds.items():
            likely = own.get(kind, 0.0) + SHARED_WEIGHT * drafts / count
            yield likely / (own_count + SHARED_WEIGHT), self.acceptance.survival(sequence, kind)

    def predicted_s(self, sequences: Sequence[RunningSequence], rows: int, drafted: int) -> float:
        """Seconds of a step over `rows` draft tokens in all that then drafts `drafted` tokens."""
        batch, context = len(sequences), _mean_context(sequences)
        verify_s = self.costs.verify_s(batch, context, batch * self.longest)
        draft_s = self.costs.draft_s(batch, context, self.longest)
        return verify_s[min(rows, len(verify_s) - 1)] + draft_s[min(drafted, self.longest)]

    def observe_step(self, batch: int, tokens: int, predicted_s: float) -> None:
        """Learn what the steps of this batch size give."""
        self._rates.setdefault(batch, RunningRate()).observe(tokens, predicted_s + self.costs.gap_s)

    def _best(self, batch: int, gains: Iterable[float], step_s: Sequence[float]) -> int:
        """The index with the most expected tokens beyond what its seconds usually give."""
        rate = self._rate(batch, batch / step_s[0])
        best, most = 0, LEAST_GAIN * batch
        for index, (gain, seconds) in enumerate(zip(gains, step_s, strict=True)):
            worth = gain - rate * (seconds - step_s[0])
            if worth > most:
                best, most = index, worth
        return best

    def _rate(self, batch: int, plain: float) -> float:
        """Tokens that a second is worth."""
        running = self._rates.get(batch)
        return plain if running is None else running.tokens_per_s(plain)

    def _note_kinds(self, sequences: Sequence[RunningSequence]) -> None:
        """Learn how often drafts are of each kind."""
        for one in sequences:
            if one.draft and one.kind != ANY_KIND:
                for kind in self._kinds:
                    self._kinds[kind] *= KIND_MEMORY
                self._kinds[one.kind] = self._kinds.get(one.kind, 0.0) + 1.0

    def _note_available(self, drafted: Sequence[int]) -> None:
        """Learn which share of the sequences has a draft, where one was asked for."""
        batch = len(drafted)
        share = sum(count > 0 for count in drafted) / batch
        before = self._available.get(batch, 1.0)
        self._available[batch] = before + 0.02 * (share - before)


def _mean_context(sequences: Sequence[RunningSequence]) -> float:
    return sum(sequence.context for sequence in sequences) / len(sequences)
