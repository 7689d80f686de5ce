"""The draft length with the highest expected tokens a second, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from integrations.acceptance import ANY_KIND, AcceptanceByPosition
from integrations.costs import StepCosts

Array = NDArray[np.float64]

RATE_MEMORY = 0.97  # of tokens and seconds, a step
EXPLORED_SHARE = 0.002  # of the time, for drafts longer than the best
FREE_SHARE = 0.005  # of a plain step, below which the cost of a draft is not weighed
LEAST_GAIN = 0.01  # by which drafts must pay, as a share of a plain step


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningSequence:
    """One sequence of a step: its name, cached tokens, draft tokens at hand and their kind."""

    name: str
    context: int
    drafted: int = 0
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
        self._allowed = np.array(sorted({0, *allowed}), dtype=np.int64)
        self.longest = int(self._allowed[-1])
        self.acceptance = AcceptanceByPosition(self.longest)
        self._available: dict[int, float] = {}
        self._rates: dict[int, RunningRate] = {}
        self._positions = np.arange(self.longest)
        self._credit_s = 0.0
        self._asked = False  # whether the drafts at hand were asked for

    def verified(self, sequences: Sequence[RunningSequence]) -> list[int]:
        """How many of its drafted tokens each sequence should verify now."""
        if not sequences:
            return []
        drafted = np.array([min(sequence.drafted, self.longest) for sequence in sequences])
        if self._asked:
            self._note_available(drafted)
        total = int(drafted.sum())
        if total == 0:
            return [0] * len(sequences)
        survival = self.acceptance.survival([(one.name, one.kind) for one in sequences])
        at_hand = self._positions < drafted[:, None]
        gains = np.sort(survival[at_hand])[::-1]
        batch, context = len(sequences), _mean_context(sequences)
        step_s = self.costs.verify_s(batch, context, batch * self.longest)[: total + 1]
        step_s = step_s + self.costs.gap_s + self.costs.draft_s(batch, context, self.longest)[0]
        chosen = self._best(len(sequences), np.concatenate([[0.0], np.cumsum(gains)]), step_s)
        if chosen == 0:
            return [0] * len(sequences)
        least = gains[chosen - 1]
        lengths = ((survival >= least) & at_hand).sum(axis=1)
        return [int(length) for length in lengths]

    def draft_length(self, sequences: Sequence[RunningSequence]) -> int:
        """How many tokens to draft for the next step: the same number for all sequences."""
        length = self._draft_length(sequences)
        self._asked = length > 0
        return length

    def _draft_length(self, sequences: Sequence[RunningSequence]) -> int:
        batch = len(sequences)
        if batch == 0:
            return 0
        context = _mean_context(sequences)
        plain_s = float(self.costs.verify_s(batch, context, batch * self.longest)[0])
        draft_s = self.costs.draft_s(batch, context, self.longest)[self._allowed]
        if self.shortens and float(draft_s[-1] - draft_s.min()) <= FREE_SHARE * plain_s:
            return self.longest  # what it costs is less than a choice is worth
        survival = self.acceptance.survival([(one.name, ANY_KIND) for one in sequences]).sum(axis=0)
        share = self._available.get(batch, 1.0)
        gains = share * np.concatenate([[0.0], np.cumsum(survival)])[self._allowed]
        rows = np.rint(share * batch * self._allowed).astype(np.int64)
        most = batch * self.longest
        step_s = self.costs.verify_s(batch, context, most)[rows] + self.costs.gap_s
        best = self._best(batch, gains, step_s + draft_s)
        at_stake_s = draft_s if self.shortens else step_s + draft_s
        extra_s = float(at_stake_s[-1] - at_stake_s[best])
        self._credit_s += EXPLORED_SHARE * float(step_s[best])
        if extra_s <= self._credit_s:
            self._credit_s = min(self._credit_s - max(extra_s, 0.0), float(step_s[0]))
            return self.longest
        return int(self._allowed[best])

    def predicted_s(self, sequences: Sequence[RunningSequence], rows: int, drafted: int) -> float:
        """Seconds of a step over `rows` draft tokens in all that then drafts `drafted` tokens."""
        batch, context = len(sequences), _mean_context(sequences)
        verify_s = self.costs.verify_s(batch, context, batch * self.longest)
        draft_s = self.costs.draft_s(batch, context, self.longest)
        return float(verify_s[min(rows, len(verify_s) - 1)] + draft_s[min(drafted, self.longest)])

    def observe_step(self, batch: int, tokens: int, predicted_s: float) -> None:
        """Learn what the steps of this batch size give."""
        self._rates.setdefault(batch, RunningRate()).observe(tokens, predicted_s + self.costs.gap_s)

    def _best(self, batch: int, gains: Array, step_s: Array) -> int:
        """The index with the most expected tokens beyond what its seconds usually give."""
        plain = batch / float(step_s[0])
        running = self._rates.get(batch)
        rate = plain if running is None else running.tokens_per_s(plain)
        worth = gains - rate * (step_s - step_s[0])
        best = int(np.argmax(worth))
        return best if worth[best] > LEAST_GAIN * batch else 0

    def _note_available(self, drafted: NDArray[np.int64]) -> None:
        """Learn which share of the sequences has a draft, where one was asked for."""
        batch = len(drafted)
        before = self._available.get(batch, 1.0)
        self._available[batch] = before + 0.02 * (float((drafted > 0).mean()) - before)


def _mean_context(sequences: Sequence[RunningSequence]) -> float:
    return sum(sequence.context for sequence in sequences) / len(sequences)
