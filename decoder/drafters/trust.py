"""Which of two drafters to believe, learnt from what the target wrote."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from decoder.drafters.evidence import Evidence, child_of
from decoder.drafters.union import TrustArrays
from decoder.drafters.weighing import DEPTHS, KINDS, first_says, second_says, weigh, witnessed
from decoder.jit import jit

# Weights before anything is seen: of the first source, of the second and of both as witnesses;
# and how many tokens they count as. There is no part for tokens that neither names: what the
# sources leave to those is in their corrected probabilities, and would be taken off twice.
PRIOR_MIXTURE = np.array([0.25, 0.35, 0.4])
PRIOR_TOKENS = 16.0
FORGETTING = 0.998  # of old tokens, for each new one of the same kind
LEAN_FORGETTING = 0.98
LEAN_PRIOR = 8.0  # tokens
# The probability of any one token to a source that does not name it.
UNNAMED = 1e-4


class Trust:
    """What is learnt of two sources; shared by all texts of a drafter.

    arrays  predicted and realised hits [source, depth, kind, best or other child], which
            fade together; how often each part of the mixture explained the token, [root or
            below, kind of the first, kind of the second, part]; and, by the same, how often
            both sources missed it, [..., expected of independent ones or realised]
    """

    def __init__(self) -> None:
        shape = (2, DEPTHS, KINDS, 2)
        counts = np.tile(PRIOR_MIXTURE * PRIOR_TOKENS, (2, KINDS, KINDS, 1))
        missed = np.zeros((2, KINDS, KINDS, 2))
        self.arrays: TrustArrays = (np.zeros(shape), np.zeros(shape), counts, missed)


class Lean:
    """How much more each part of the mixture explains of one text than of all texts."""

    def __init__(self) -> None:
        self._expected_and_realised = np.zeros((2, len(PRIOR_MIXTURE)))

    def factors(self) -> NDArray[np.float64]:
        """[3] for the weights of the mixture, 1 each before anything is seen."""
        expected, realised = self._expected_and_realised
        factors: NDArray[np.float64] = (realised + LEAN_PRIOR) / (expected + LEAN_PRIOR)
        return factors

    def learn(self, evidence: Evidence, emitted: Sequence[int], trust: Trust) -> None:
        """Learn, here and for all texts, from the tokens that followed the evidence's root."""
        _learn(
            np.array(emitted, dtype=np.int64),
            evidence.arrays(),
            trust.arrays,
            self.factors(),
            self._expected_and_realised,
        )


@jit
def _learn(emitted, evidence, trust, lean, leaning):  # type: ignore[no-untyped-def]
    """Follow the emitted tokens as far as a source says anything behind them."""
    row, on_best = np.int64(0), True
    for position in range(len(emitted)):
        token = emitted[position]
        worth = weigh(row, position, on_best, evidence, (trust, lean))
        said_a, said_b = worth.said_a, worth.said_b
        if said_a.kind == 0 and said_b.kind == 0:
            break
        child = child_of(evidence[0], row, token) if row >= 0 else row
        p = first_says(child, evidence, worth)
        q, best_b = second_says(token, child, position, evidence, worth)
        if said_a.kind > 0 and said_b.kind > 0:
            kinds = min(position, 1), said_a.kind, said_b.kind
            _explain(p, q, worth, trust[2][kinds], leaning)
            missed = trust[3][kinds]
            missed[0] = missed[0] * FORGETTING + worth.left_a * worth.left_b
            missed[1] = missed[1] * FORGETTING + (0.0 if p > 0.0 or q > 0.0 else 1.0)
        level = min(position, DEPTHS - 1)
        best_a = child >= 0 and child == said_a.best
        for source in range(2):
            said = said_a if source == 0 else said_b
            slot = source, level, said.kind
            is_best, named = (best_a, p > 0.0) if source == 0 else (best_b, q > 0.0)
            _tally(said, is_best, named, trust[0][slot], trust[1][slot])
        row, on_best = child, on_best and best_b


@jit
def _explain(p, q, worth, counts, leaning):  # type: ignore[no-untyped-def]
    """Share one token among the parts of the mixture, as expectation maximisation does."""
    both = witnessed(p, q, worth)
    left_both = worth.left_a * worth.left_b / worth.divisor if worth.divisor > 0.0 else 0.0
    one = worth.one * (p if p > 0.0 else worth.left_a * UNNAMED)
    two = worth.two * (q if q > 0.0 else worth.left_b * UNNAMED)
    both = worth.both * (both if both > 0.0 else left_both * UNNAMED)
    total = one + two + both
    if not total > 0.0:
        return
    shares = one / total, two / total, both / total
    weights = worth.one, worth.two, worth.both
    for part in range(3):
        counts[part] = counts[part] * FORGETTING + shares[part]
        leaning[0, part] = leaning[0, part] * LEAN_FORGETTING + weights[part]
        leaning[1, part] = leaning[1, part] * LEAN_FORGETTING + shares[part]


@jit
def _tally(said, is_best, named, predicted, realised):  # type: ignore[no-untyped-def]
    """Compare what a source said of its best child and of its others with what happened."""
    if said.kind == 0:
        return
    others = max(min(said.total, 1.0) - said.top, 0.0)
    predicted[0] = predicted[0] * FORGETTING + said.top
    predicted[1] = predicted[1] * FORGETTING + others
    realised[0] = realised[0] * FORGETTING + (1.0 if is_best else 0.0)
    realised[1] = realised[1] * FORGETTING + (1.0 if named and not is_best else 0.0)
