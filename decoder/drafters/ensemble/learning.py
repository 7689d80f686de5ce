"""Online learning of the mixture of two drafters, from the tokens that the target emitted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from decoder.drafters.ensemble.mixture import (
    CLASSES,
    DEPTHS,
    JointDraft,
    child_of,
    expert_product,
    first_probability,
    mixture_behind,
    second_probability,
)
from decoder.drafters.ensemble.search import StatisticsArrays
from decoder.jit import jit

# Weights of the mixture at first (the first drafter, the second, both as experts), and the tokens
# that they count as. There is no part for tokens that neither names: what the drafters leave to
# those is in their calibrated probabilities, and would be taken off twice.
PRIOR_WEIGHTS = np.array([0.25, 0.35, 0.4])
PRIOR_TOKENS = 16.0
FORGETTING = 0.998  # factor of old counts for each new token of the same class
TEXT_FORGETTING = 0.98
TEXT_PRIOR = 8.0  # tokens
UNNAMED = 1e-4  # probability of any one token to a drafter that does not name it


class EnsembleStatistics:
    """Counts of two drafters, shared by all texts.

    arrays  in this order, with fading counts:
      predicted  [drafter, depth, confidence, best or other child]: hits that were predicted
      realised   the same: hits that came true
      counts     [root or below, confidence of the first, of the second, part of the mixture]:
                 tokens that each part explained
      missed     [root or below, confidence of the first, of the second, expected or realised]:
                 tokens that both missed, as expected of independent drafters and in fact
    """

    def __init__(self) -> None:
        shape = (2, DEPTHS, CLASSES, 2)
        counts = np.tile(PRIOR_WEIGHTS * PRIOR_TOKENS, (2, CLASSES, CLASSES, 1))
        missed = np.zeros((2, CLASSES, CLASSES, 2))
        self.arrays: StatisticsArrays = (np.zeros(shape), np.zeros(shape), counts, missed)


class TextWeights:
    """Factors of the mixture's weights in one text, learnt beside those of all texts."""

    def __init__(self) -> None:
        self._expected_and_realised = np.zeros((2, len(PRIOR_WEIGHTS)))

    def factors(self) -> NDArray[np.float64]:
        """[3], one for each part of the mixture; 1 at first."""
        expected, realised = self._expected_and_realised
        factors: NDArray[np.float64] = (realised + TEXT_PRIOR) / (expected + TEXT_PRIOR)
        return factors

    def learn(
        self, joint: JointDraft, emitted: Sequence[int], statistics: EnsembleStatistics
    ) -> None:
        """Count the tokens that followed the draft's root, for this text and for all."""
        _learn(
            np.array(emitted, dtype=np.int64),
            joint.arrays(),
            statistics.arrays,
            self.factors(),
            self._expected_and_realised,
        )


@jit
def _learn(emitted, joint, statistics, factors, text_counts):  # type: ignore[no-untyped-def]
    """Follow the emitted tokens as far as a drafter proposes anything behind them."""
    row, on_best = np.int64(0), True
    for position in range(len(emitted)):
        token = emitted[position]
        mixture = mixture_behind(row, position, on_best, joint, (statistics, factors))
        first, second = mixture.first, mixture.second
        if first.confidence == 0 and second.confidence == 0:
            break
        child = child_of(joint[0], row, token) if row >= 0 else row
        p = first_probability(child, joint, mixture)
        q, best_of_second = second_probability(token, child, position, joint, mixture)
        if first.confidence > 0 and second.confidence > 0:
            classes = min(position, 1), first.confidence, second.confidence
            _explain(p, q, mixture, statistics[2][classes], text_counts)
            missed = statistics[3][classes]
            missed[0] = missed[0] * FORGETTING + mixture.left_first * mixture.left_second
            missed[1] = missed[1] * FORGETTING + (0.0 if p > 0.0 or q > 0.0 else 1.0)
        level = min(position, DEPTHS - 1)
        best_of_first = child >= 0 and child == first.best
        for drafter in range(2):
            prediction = first if drafter == 0 else second
            slot = drafter, level, prediction.confidence
            is_best, named = (best_of_first, p > 0.0) if drafter == 0 else (best_of_second, q > 0.0)
            _count_hits(prediction, is_best, named, statistics[0][slot], statistics[1][slot])
        row, on_best = child, on_best and best_of_second


@jit
def _explain(p, q, mixture, counts, text_counts):  # type: ignore[no-untyped-def]
    """Share one token among the parts of the mixture: an expectation-maximisation step."""
    product = expert_product(p, q, mixture)
    left_first, left_second = mixture.left_first, mixture.left_second
    left_both = left_first * left_second / mixture.divisor if mixture.divisor > 0.0 else 0.0
    one = mixture.weight_first * (p if p > 0.0 else left_first * UNNAMED)
    two = mixture.weight_second * (q if q > 0.0 else left_second * UNNAMED)
    both = mixture.weight_both * (product if product > 0.0 else left_both * UNNAMED)
    total = one + two + both
    if not total > 0.0:
        return
    shares = one / total, two / total, both / total
    weights = mixture.weight_first, mixture.weight_second, mixture.weight_both
    for part in range(3):
        counts[part] = counts[part] * FORGETTING + shares[part]
        text_counts[0, part] = text_counts[0, part] * TEXT_FORGETTING + weights[part]
        text_counts[1, part] = text_counts[1, part] * TEXT_FORGETTING + shares[part]


@jit
def _count_hits(prediction, is_best, named, predicted, realised):  # type: ignore[no-untyped-def]
    """Count the hits that a drafter predicted, of its best child and of others, and real ones."""
    if prediction.confidence == 0:
        return
    others = max(min(prediction.total, 1.0) - prediction.top, 0.0)
    predicted[0] = predicted[0] * FORGETTING + prediction.top
    predicted[1] = predicted[1] * FORGETTING + others
    realised[0] = realised[0] * FORGETTING + (1.0 if is_best else 0.0)
    realised[1] = realised[1] * FORGETTING + (1.0 if named and not is_best else 0.0)
