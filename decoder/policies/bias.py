"""What is learnt while decoding: the drafter's bias, the speed reached, whether drafting pays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from decoder.jit import jit
from decoder.tree import EMPTY, DraftTree


class DepthBias:
    """How often a depth's drafted children were accepted, over how often predicted.

    Both sums fade by `FADING` a drafted round and start from pseudo-observations of a drafter
    without bias: `PRIOR` where it promises too much, `UPWARD_PRIOR` where too little. Deep
    rows are reached in texts that go on as drafted and say little of others, and products of
    many factors above 1 promise long paths everywhere. In plain rounds both fade by
    `RECOVERY`, so that a drafter once found useless is tried again, at some few per cent of
    the rounds.
    """

    FADING = 0.99
    RECOVERY = 0.999
    PRIOR = 1.0
    UPWARD_PRIOR = 8.0
    DEPTHS = 64

    def __init__(self) -> None:
        self._predicted = np.zeros(self.DEPTHS)
        self._realised = np.zeros(self.DEPTHS)
        self._factors = np.ones(self.DEPTHS)
        self.observe(EMPTY, [])  # compiled before the first round

    def factors(self) -> NDArray[np.float64]:
        """[depths] factors for the probabilities of each depth."""
        self._factors = _factors(self._predicted, self._realised, self.PRIOR, self.UPWARD_PRIOR)
        return self._factors

    def observe(self, tree: DraftTree, accepted_rows: list[int]) -> None:
        """Compare, at each visited row, the children's probability with what happened."""
        fading = self.FADING if tree.nodes else self.RECOVERY
        self._predicted *= fading
        self._realised *= fading
        path = np.array([0, *accepted_rows], dtype=np.int64)
        # The tree was built with the factors on; predictions are compared without them.
        _count(tree.parents, tree.scores, path, self._factors, self._predicted, self._realised)


@jit
def _factors(predicted, realised, prior, upward):  # type: ignore[no-untyped-def]
    factors = np.empty_like(predicted)
    for depth in range(len(factors)):
        pseudo = upward if realised[depth] > predicted[depth] else prior
        factors[depth] = (realised[depth] + pseudo) / (predicted[depth] + pseudo)
    return factors


@jit
def _count(parents, scores, path, factors, predicted, realised):  # type: ignore[no-untyped-def]
    """Add what was predicted and what came true below each row of the path, root first."""
    above = 1.0
    for depth in range(min(len(path), len(predicted))):
        total, children = 0.0, 0
        for node in range(len(parents)):
            if parents[node] == path[depth]:
                total += scores[node]
                children += 1
        if children == 0 or above <= 0.0:
            return
        predicted[depth] += min(total / above / factors[depth], 1.0)
        if depth + 1 < len(path):
            realised[depth] += 1.0
            above = scores[path[depth + 1] - 1]


class Pace:
    """The speed that decoding has reached: tokens in the time of one plain step.

    Both counts fade by `FADING` a round. Seconds are the cost model's, so that a model which
    is wrong by a factor still leads to the same choices.
    """

    FADING = 0.99

    def __init__(self) -> None:
        self._committed = 0.0
        self._plain_steps = 0.0

    def speed(self) -> float | None:
        """None before the first round; at least 1, which plain steps always reach."""
        if self._plain_steps == 0.0:
            return None
        return max(self._committed / self._plain_steps, 1.0)

    def observe(self, committed: int, plain_steps: float) -> None:
        """A round's tokens, and its time in plain steps."""
        self._committed = self._committed * self.FADING + committed
        self._plain_steps = self._plain_steps * self.FADING + plain_steps


class DraftGate:
    """Stops drafting while it does not pay, and tries again, at first soon and then rarely.

    Once candidates exist their cost is sunk, so this decision is made before drafting, from
    what recent drafted rounds gained: the plain steps that they replaced less those that they
    took. It closes when the gain is below zero by more than its standard error. A few rounds
    say little, so after a close half of the evidence is forgotten and the wait is short; every
    further close doubles it.
    """

    FIRST_WAIT, LONGEST_WAIT = 4, 64  # plain rounds
    ENOUGH = 4.0  # drafted rounds before it may close
    FADING = 0.95
    FREE_SHARE = 0.005  # a draft below this share of a plain step never needs a decision

    def __init__(self) -> None:
        self._rounds = 0.0
        self._gain = 0.0
        self._squares = 0.0
        self._wait = self.FIRST_WAIT
        self._plain_left = 0

    def open(self) -> bool:
        """Whether this round drafts."""
        drafting = self._plain_left == 0
        self._plain_left = max(self._plain_left - 1, 0)
        return drafting

    def observe(self, committed: int, plain_steps: float, draft_steps: float) -> None:
        """A drafted round's tokens, its time in plain steps, and that of its draft alone."""
        if draft_steps < self.FREE_SHARE:
            return
        self._add(committed - plain_steps)
        mean = self._gain / self._rounds
        error = np.sqrt(max(self._squares / self._rounds - mean**2, 0.0) / self._rounds)
        if self._rounds > self.ENOUGH and mean + error < 0.0:
            self._plain_left = self._wait
            self._wait = min(2 * self._wait, self.LONGEST_WAIT)
            self._fade(0.5)
        elif self._rounds > 2 * self.ENOUGH and mean > 0.0:
            self._wait = self.FIRST_WAIT

    def _add(self, gain: float) -> None:
        self._fade(self.FADING)
        self._rounds += 1.0
        self._gain += gain
        self._squares += gain**2

    def _fade(self, share: float) -> None:
        self._rounds *= share
        self._gain *= share
        self._squares *= share
