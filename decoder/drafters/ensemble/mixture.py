"""The mixture of two drafters' predictions for the token after a path.

Each drafter's probabilities are calibrated by how often they came true. Three predictions are
mixed: the first drafter's p, the second's q, and that of both as independent experts,

    both(x) = p(x) q(x) / (sum over common tokens of p q + (1 - sum p) (1 - sum q)),

whose last term is the case that neither names the token. `ensemble.learning` keeps the counts
for the calibration and for the weights of the mixture.

Two drafters that name different tokens cover more together than the better one alone, and a
weighted mean of them does not show it. So the mixture is scaled to the sum

    1 - r (1 - sum p) (1 - sum q),

where r is 1 if the drafters miss tokens independently of each other; the measured ratio takes its
place. Where one drafter proposes nothing, the other's calibrated probabilities hold. The children
of one path never sum to more than 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoder.jit import jit
from decoder.tree.draft_tree import CandidateTree, Lattice, best_first

TOKEN, PARENT, CHILD, SIBLING = range(4)  # columns of a trie, by row; -1: none
NO_TREE = CandidateTree(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
NO_LATTICE = Lattice(np.zeros((0, 0), np.int64), np.zeros((0, 0)))

CONFIDENCE_EDGES = (0.3, 0.6, 0.85)  # of the largest probability that a drafter gives
SURE = len(CONFIDENCE_EDGES) + 1
# A drafter's confidence class behind a path: 0 where it proposes nothing, 1..SURE by its largest
# probability, and SURE more for marginals off their own best path: what a block drafter says of a
# position supposes its best tokens at the positions before.
CLASSES = 1 + 2 * SURE
DEPTHS = 4  # the calibration is kept apart for depths 1, 2, 3, and 4 or more
CALIBRATION_PRIOR = 4.0  # pseudo-observations of a drafter that is calibrated already
MISSES_PRIOR = 1.0  # pseudo-observations of a token that both drafters miss independently


@dataclass(frozen=True, slots=True)
class JointDraft:
    """The candidates of two drafters as arrays, of the same types whatever they drafted.

    trie    int64 [M + 1, 4]    the paths of both trees; row 0 is the root, parents come first
    given   float64 [M + 1, 2]  probability of a row given its parent in each drafter's tree; 0
                                where the tree lacks it
    tokens  int64 [gamma, K]    the second drafter's marginals; empty where it gave a tree
    shares  float64 [gamma, K]  their probabilities
    totals  float64 [gamma]     sums of these by position
    """

    trie: NDArray[np.int64]
    given: NDArray[np.float64]
    tokens: NDArray[np.int64]
    shares: NDArray[np.float64]
    totals: NDArray[np.float64]

    def arrays(self) -> tuple[NDArray[Any], ...]:
        """The fields in order, as the compiled functions take them."""
        return self.trie, self.given, self.tokens, self.shares, self.totals

    def followed(self, emitted: Sequence[int]) -> int:
        """The number of emitted tokens, from the first on, that are a path of the trie."""
        row = 0
        for count, token in enumerate(emitted):
            row = child_of(self.trie, row, token)
            if row < 0:
                return count
        return len(emitted)


def join_drafts(
    first: Lattice | CandidateTree, second: Lattice | CandidateTree | None, nodes: int
) -> JointDraft:
    """The joint draft of two drafters; `second` is None where only the first one drafted.

    A lattice of the first drafter counts as the tree of its best `nodes` paths.
    """
    tree = _as_tree(first, nodes) if isinstance(first, Lattice) else first
    other, lattice = NO_TREE, NO_LATTICE
    if isinstance(second, Lattice):
        lattice = second
    elif second is not None:
        other = second
    trie, given = _merge(_arrays(tree), _arrays(other))
    tokens = np.array(lattice.tokens, dtype=np.int64, order="C")
    shares = np.array(lattice.probabilities, dtype=np.float64, order="C")
    return JointDraft(trie, given, tokens, shares, _totals(shares))


def _arrays(
    tree: CandidateTree,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    return (
        np.array(tree.tokens, dtype=np.int64),
        np.array(tree.parents, dtype=np.int64),
        np.array(tree.probabilities, dtype=np.float64),
    )


def _as_tree(lattice: Lattice, nodes: int) -> CandidateTree:
    paths = best_first(lattice, nodes)
    above = np.concatenate((np.ones(1), paths.scores))[paths.parents]
    given = np.divide(paths.scores, above, out=np.zeros(paths.nodes), where=above > 0.0)
    return CandidateTree(paths.tokens, paths.parents, given)


@jit
def _sound(probability):  # type: ignore[no-untyped-def]
    """A damaged drafter's value as a probability: above 1 becomes 1, NaN becomes 0."""
    return min(probability, 1.0) if probability > 0.0 else 0.0


@jit
def _totals(shares):  # type: ignore[no-untyped-def]
    """The sum of each position's probabilities, which are made sound in place."""
    totals = np.zeros(shares.shape[0])
    for position in range(shares.shape[0]):
        for rank in range(shares.shape[1]):
            shares[position, rank] = _sound(shares[position, rank])
            totals[position] += shares[position, rank]
    return totals


@jit
def _merge(first, second):  # type: ignore[no-untyped-def]
    """The trie of two trees, and each tree's probability of its rows."""
    room = len(first[0]) + len(second[0]) + 1
    trie = np.full((room, 4), -1, np.int64)
    given = np.zeros((room, 2), np.float64)
    size = 1
    for drafter in range(2):
        tokens, parents, probabilities = first if drafter == 0 else second
        rows = np.zeros(len(tokens) + 1, np.int64)  # of the trie, by row of the drafter's tree
        for node in range(len(tokens)):
            parent = rows[parents[node]]
            row = child_of(trie, parent, tokens[node])
            if row < 0:
                row = size
                trie[row, TOKEN], trie[row, PARENT] = tokens[node], parent
                trie[row, SIBLING] = trie[parent, CHILD]
                trie[parent, CHILD] = row
                size += 1
            given[row, drafter] = _sound(given[row, drafter] + _sound(probabilities[node]))
            rows[node + 1] = row
    return trie[:size], given[:size]


@jit
def child_of(trie, row, token):  # type: ignore[no-untyped-def]
    """The row of `row`'s child that carries `token`, or -1; a row of -1 has no children."""
    child = trie[row, CHILD] if row >= 0 else np.int64(-1)
    while child >= 0 and trie[child, TOKEN] != token:
        child = trie[child, SIBLING]
    return child


class Prediction(NamedTuple):
    """One drafter's prediction behind a path.

    top         its largest probability
    total       the sum of its probabilities
    confidence  its confidence class; 0 where it proposes nothing
    best        the row of its best child where its candidates are a tree, else -1
    """

    top: Any
    total: Any
    confidence: Any
    best: Any


class Mixture(NamedTuple):
    """The mixture behind one path; all fields but the predictions are plain numbers.

    first, second         the drafters' predictions
    weight_*              of the mixture's three parts
    best_*, rest_*        calibration factors of a drafter's best child and of its others
    left_*                probability that a drafter leaves to tokens it does not name
    divisor               of the part `both`
    scale                 of the mixture, which gives named tokens their sum
    """

    first: Any
    second: Any
    weight_first: Any
    weight_second: Any
    weight_both: Any
    best_first: Any
    rest_first: Any
    left_first: Any
    best_second: Any
    rest_second: Any
    left_second: Any
    divisor: Any
    scale: Any


@jit
def mixture_behind(row, position, on_best, joint, learnt):  # type: ignore[no-untyped-def]
    """The mixture for the tokens at a position (0: below the root) behind a path.

    row      of the path in the trie, -1 where it has left the trie
    on_best  whether all tokens of the path are the best of their positions in the marginals
    learnt   the arrays of `EnsembleStatistics` and the factors of `TextWeights`
    """
    trie, given, tokens, shares, totals = joint
    (predicted, realised, counts, missed), factors = learnt
    first = _tree_prediction(trie, given, row, 0, True)
    if tokens.shape[0] > 0:
        second = _marginal_prediction(shares, totals, position, on_best)
    else:
        second = _tree_prediction(trie, given, row, 1, True)
    level, below = min(position, DEPTHS - 1), min(position, 1)
    best_first, rest_first, left_first = _calibration(
        first, predicted[0, level, first.confidence], realised[0, level, first.confidence]
    )
    best_second, rest_second, left_second = _calibration(
        second, predicted[1, level, second.confidence], realised[1, level, second.confidence]
    )
    weight_first, weight_second, weight_both = _weights(
        first.confidence,
        second.confidence,
        counts[below, first.confidence, second.confidence],
        factors,
    )
    weights = weight_first, weight_second, weight_both
    calibrated = best_first, rest_first, left_first, best_second, rest_second, left_second
    mixture = Mixture(first, second, *weights, *calibrated, 1.0, 1.0)
    if first.confidence == 0 or second.confidence == 0:
        return mixture
    divisor = left_first * left_second
    child = trie[row, CHILD] if row >= 0 else np.int64(-1)
    while child >= 0:
        p = first_probability(child, joint, mixture)
        if p > 0.0:
            token = trie[child, TOKEN]
            divisor += p * second_probability(token, child, position, joint, mixture)[0]
        child = trie[child, SIBLING]
    neither = missed_by_both(
        missed[below, first.confidence, second.confidence], left_first, left_second
    )
    named = weight_first * (1.0 - left_first) + weight_second * (1.0 - left_second)
    if divisor > 0.0:
        named += weight_both * (1.0 - left_first * left_second / divisor)
    scale = (1.0 - neither) / named if named > 0.0 else 1.0
    return Mixture(first, second, *weights, *calibrated, divisor, scale)


@jit
def missed_by_both(missed, left_first, left_second):  # type: ignore[no-untyped-def]
    """The probability of a token that neither drafter names.

    missed  [2] such tokens so far: expected of independent drafters, and realised
    """
    ratio = (missed[1] + MISSES_PRIOR) / (missed[0] + MISSES_PRIOR)
    return min(ratio * left_first * left_second, 1.0)


@jit
def first_probability(child, joint, mixture):  # type: ignore[no-untyped-def]
    """The first drafter's calibrated probability of a row of the trie; 0 for row -1."""
    if child < 0:
        return 0.0
    factor = mixture.best_first if child == mixture.first.best else mixture.rest_first
    return joint[1][child, 0] * factor


@jit
def second_probability(token, child, position, joint, mixture):  # type: ignore[no-untyped-def]
    """The second drafter's calibrated probability of a token, and whether that is its best.

    child  the token's row in the trie, or -1
    """
    _, given, tokens, shares, _ = joint
    if tokens.shape[0] == 0:
        is_best = child >= 0 and child == mixture.second.best
        share = given[child, 1] if child >= 0 else 0.0
    else:
        rank = _rank_of(tokens, position, token)
        is_best = rank == 0
        share = shares[position, rank] if rank >= 0 else 0.0
    return share * (mixture.best_second if is_best else mixture.rest_second), is_best


@jit
def expert_product(p, q, mixture):  # type: ignore[no-untyped-def]
    """The probability of a token to which two independent experts give p and q."""
    return p * q / mixture.divisor if p > 0.0 and q > 0.0 else 0.0


@jit
def mixture_probability(p, q, mixture):  # type: ignore[no-untyped-def]
    """The mixture's probability of a token to which the drafters give p and q."""
    return mixture.scale * (
        mixture.weight_first * p
        + mixture.weight_second * q
        + mixture.weight_both * expert_product(p, q, mixture)
    )


@jit
def _tree_prediction(trie, given, row, drafter, on_best):  # type: ignore[no-untyped-def]
    top, total, best = 0.0, 0.0, np.int64(-1)
    child = trie[row, CHILD] if row >= 0 else np.int64(-1)
    while child >= 0:
        share = given[child, drafter]
        total += share
        if share > top:
            top, best = share, child
        child = trie[child, SIBLING]
    return Prediction(top, total, _confidence(top, on_best), best)


@jit
def _marginal_prediction(shares, totals, position, on_best):  # type: ignore[no-untyped-def]
    if position >= shares.shape[0] or shares.shape[1] == 0:
        return Prediction(0.0, 0.0, 0, np.int64(-1))
    top = shares[position, 0]
    return Prediction(top, totals[position], _confidence(top, on_best), np.int64(-1))


@jit
def _rank_of(tokens, position, token):  # type: ignore[no-untyped-def]
    if position < tokens.shape[0]:
        for rank in range(tokens.shape[1]):
            if tokens[position, rank] == token:
                return rank
    return -1


@jit
def _confidence(top, on_best):  # type: ignore[no-untyped-def]
    """The confidence class of a drafter whose largest probability is `top`."""
    if top <= 0.0:
        return 0
    level = 1
    for edge in CONFIDENCE_EDGES:
        level += 1 if top >= edge else 0
    return level if on_best else level + SURE


@jit
def _calibration(prediction, predicted, realised):  # type: ignore[no-untyped-def]
    """Factors of a drafter's best child and of its others, and what they leave, 0 or more.

    predicted, realised  [2] hits so far of best children and of others
    """
    best = (realised[0] + CALIBRATION_PRIOR) / (predicted[0] + CALIBRATION_PRIOR)
    rest = (realised[1] + CALIBRATION_PRIOR) / (predicted[1] + CALIBRATION_PRIOR)
    mass = best * prediction.top + rest * max(prediction.total - prediction.top, 0.0)
    if mass <= 1.0:
        return best, rest, 1.0 - mass
    return best / mass, rest / mass, 0.0


@jit
def _weights(first_class, second_class, counts, factors):  # type: ignore[no-untyped-def]
    """Weights of the first drafter, of the second, and of both as experts; they sum to 1.

    counts  [3] tokens that each part explained where the drafters had these confidences
    """
    if first_class == 0 or second_class == 0:
        return (1.0 if first_class > 0 else 0.0), (1.0 if second_class > 0 else 0.0), 0.0
    one, two, both = counts[0] * factors[0], counts[1] * factors[1], counts[2] * factors[2]
    total = one + two + both
    return one / total, two / total, both / total
