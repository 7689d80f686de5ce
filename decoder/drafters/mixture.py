"""The mixture of two drafters' predictions over one trie, its best paths, and its online learning.

Each drafter's probabilities are calibrated by how often they came true. Three predictions for the
token after a path are mixed: the first drafter's p, the second's q, and that of both as
independent experts,

    both(x) = p(x) q(x) / (sum over common tokens of p q + (1 - sum p) (1 - sum q)),

whose last term is the case that neither names the token. The mixture is scaled to the sum

    1 - r (1 - sum p) (1 - sum q),

because two drafters that name different tokens cover more together than the better one alone.
r is 1 if the drafters miss tokens independently of each other; the measured ratio takes its place.
Where one drafter proposes nothing, the other's calibrated probabilities hold. The children of one
path never sum to more than 1.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from costmodel.statistics import Array, Ints
from decoder.jit import jit, jit_inner
from decoder.tree.draft_tree import (
    NO_CANDIDATES,
    Candidates,
    CandidateTree,
    Lattice,
    sift_down,
    sift_up,
)

TOKEN, CHILD, SIBLING = range(3)  # columns of a trie, by row; -1: none
CONFIDENCE_EDGES = (0.3, 0.6, 0.85)  # of the largest probability that a drafter gives
SURE = len(CONFIDENCE_EDGES) + 1
# A drafter's confidence class behind a path: 0 where it proposes nothing, 1..SURE by its largest
# probability, and SURE more for marginals off their own best path, which suppose that path.
CLASSES = 1 + 2 * SURE
DEPTHS = 4  # the calibration is kept apart for depths 1, 2, 3, and 4 or more
CALIBRATION_PRIOR = 4.0  # pseudo-observations of a drafter that is calibrated already
MISSES_PRIOR = 1.0  # pseudo-observations of a token that both drafters miss independently
# Weights of the mixture at first, and the tokens that they count as.
PRIOR_WEIGHTS = np.array([0.25, 0.35, 0.4])
PRIOR_TOKENS = 16.0
FORGETTING = 0.998  # factor of old counts for each new token of the same class
NO_MARGINALS = Lattice(np.zeros((0, 0), np.int64), np.zeros((0, 0)))
UNNAMED = 1e-4  # probability of any one token to a drafter that does not name it


# The candidates of two drafters as arrays, of the same types whatever they drafted:
# trie    int64 [M + 1, 3]    the paths of both trees; row 0 is the root, parents come first
# given   float64 [M + 1, 2]  probability of a row given its parent in each tree; 0 if it lacks it
# tokens  int64 [gamma, K]    the second drafter's marginals; empty where it gave a tree
# shares  float64 [gamma, K]  their probabilities
# totals  float64 [gamma]     sums of these by position
JointDraft = namedtuple("JointDraft", "trie given tokens shares totals")


def join_drafts(first: Candidates, second: Candidates, nodes: int) -> JointDraft:
    """The joint draft; all but the second's marginals are trees of their best `nodes` paths."""
    if isinstance(second, Lattice) and len(second.tokens):
        marginals, other = second, NO_CANDIDATES
    else:
        marginals, other = NO_MARGINALS, second.as_tree(nodes)
    trie, given = _merge(_arrays(first.as_tree(nodes)), _arrays(other))
    places = np.array(marginals.tokens, dtype=np.int64, order="C")
    shares = np.array(marginals.probabilities, dtype=np.float64, order="C")
    return JointDraft(trie, given, places, shares, shares.sum(axis=1))


def _arrays(tree: CandidateTree) -> tuple[Ints, Ints, Array]:
    return (
        np.array(tree.tokens, dtype=np.int64),
        np.array(tree.parents, dtype=np.int64),
        np.array(tree.probabilities, dtype=np.float64),
    )


@jit
def _merge(first, second):  # type: ignore[no-untyped-def]
    """The trie of two trees, and each tree's probability of its rows."""
    room = len(first[0]) + len(second[0]) + 1
    trie = np.full((room, 3), -1, np.int64)
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
                trie[row, TOKEN], trie[row, SIBLING] = tokens[node], trie[parent, CHILD]
                trie[parent, CHILD] = row
                size += 1
            given[row, drafter] = min(given[row, drafter] + probabilities[node], 1.0)
            rows[node + 1] = row
    return trie[:size], given[:size]


@jit_inner
def first_child(trie, row):  # type: ignore[no-untyped-def]
    """The first child of a row, or -1; a row of -1 has none."""
    return trie[row, CHILD] if row >= 0 else np.int64(-1)


@jit_inner
def child_of(trie, row, token):  # type: ignore[no-untyped-def]
    """The row of `row`'s child that carries `token`, or -1."""
    child = first_child(trie, row)
    while child >= 0 and trie[child, TOKEN] != token:
        child = trie[child, SIBLING]
    return child


# Fading counts of two drafters, shared by all texts:
# predicted  [drafter, depth, confidence, best or other child]: hits that were predicted
# realised   the same: hits that came true
# counts     [root or below, confidence of the first, of the second, part of the mixture]: tokens
#            that each part explained
# missed     [root or below, confidence of the first, of the second, expected or realised]: tokens
#            that both missed, as expected of independent drafters and in fact
MixtureStatistics = namedtuple("MixtureStatistics", "predicted realised counts missed")
# A drafter's calibrated prediction behind one path: its confidence class, 0 where it proposes
# nothing; the largest of its probabilities and their sum, as it gave them; the trie's row of its
# best child, -1 for marginals; calibration factors of this child and of the others; what it leaves
# to tokens that it does not name.
Prediction = namedtuple("Prediction", "confidence top total best_row best rest left")
# The mixture behind one path, with the weights of the first drafter, of the second and of both as
# experts, the divisor of this last part, and the scale that gives named tokens their sum.
Mixture = namedtuple("Mixture", "first second weights divisor scale")


def new_statistics() -> MixtureStatistics:
    shape = (2, DEPTHS, CLASSES, 2)
    counts = np.tile(PRIOR_WEIGHTS * PRIOR_TOKENS, (2, CLASSES, CLASSES, 1))
    missed = np.zeros((2, CLASSES, CLASSES, 2))
    return MixtureStatistics(np.zeros(shape), np.zeros(shape), counts, missed)


def best_paths(joint: JointDraft, statistics: MixtureStatistics, nodes: int) -> CandidateTree:
    """The `nodes` paths of highest score, in the order of their scores."""
    return CandidateTree(*_search(joint, statistics, nodes))


# The drafters by number, typed: a literal would be compiled for each.
_FIRST, _SECOND = np.int64(0), np.int64(1)


@jit_inner
def _mixture_behind(row, position, on_best, joint, statistics):  # type: ignore[no-untyped-def]
    """The mixture for the tokens at a position (0: below the root) behind a path.

    row      of the path in the trie, -1 where it has left the trie
    on_best  whether all tokens of the path are the best of their positions in the marginals
    """
    first = _prediction(_FIRST, row, position, on_best, joint, statistics)
    second = _prediction(_SECOND, row, position, on_best, joint, statistics)
    if first.confidence == 0 or second.confidence == 0:
        alone = (1.0 if first.confidence > 0 else 0.0), (1.0 if second.confidence > 0 else 0.0), 0.0
        return Mixture(first, second, alone, 1.0, 1.0)
    place = min(position, 1), first.confidence, second.confidence
    counts, missed = statistics.counts[place], statistics.missed[place]
    counted = counts[0] + counts[1] + counts[2]
    weights = counts[0] / counted, counts[1] / counted, counts[2] / counted
    left = first.left * second.left
    divisor, child = left, first_child(joint.trie, row)
    while child >= 0:
        p, _ = _probability(_FIRST, joint.trie[child, TOKEN], child, position, joint, first)
        if p > 0.0:
            q, _ = _probability(_SECOND, joint.trie[child, TOKEN], child, position, joint, second)
            divisor += p * q
        child = joint.trie[child, SIBLING]
    named = weights[0] * (1.0 - first.left) + weights[1] * (1.0 - second.left)
    if divisor > 0.0:
        named += weights[2] * (1.0 - left / divisor)
    ratio = (missed[1] + MISSES_PRIOR) / (missed[0] + MISSES_PRIOR)
    scale = (1.0 - min(ratio * left, 1.0)) / named if named > 0.0 else 1.0
    return Mixture(first, second, weights, divisor, scale)


@jit_inner
def _prediction(drafter, row, position, on_best, joint, statistics):  # type: ignore[no-untyped-def]
    top, total, best_row, confidence = 0.0, 0.0, np.int64(-1), 1
    if drafter == 1 and len(joint.tokens) > 0:
        confidence += 0 if on_best else SURE
        if position < len(joint.shares) and joint.shares.shape[1] > 0:
            top, total = joint.shares[position, 0], joint.totals[position]
    else:
        child = first_child(joint.trie, row)
        while child >= 0:
            share = joint.given[child, drafter]
            total += share
            if share > top:
                top, best_row = share, child
            child = joint.trie[child, SIBLING]
    for edge in CONFIDENCE_EDGES:
        confidence += 1 if top >= edge else 0
    if top <= 0.0:
        confidence = 0
    place = drafter, min(position, DEPTHS - 1), confidence
    predicted, realised = statistics.predicted[place], statistics.realised[place]
    best = (realised[0] + CALIBRATION_PRIOR) / (predicted[0] + CALIBRATION_PRIOR)
    rest = (realised[1] + CALIBRATION_PRIOR) / (predicted[1] + CALIBRATION_PRIOR)
    mass = best * top + rest * max(total - top, 0.0)
    by, left = max(mass, 1.0), max(1.0 - mass, 0.0)
    return Prediction(confidence, top, total, best_row, best / by, rest / by, left)


@jit_inner
def _probability(drafter, token, child, position, joint, prediction):  # type: ignore[no-untyped-def]
    """A drafter's probability of a token (its row of the trie, or -1); whether it is the best."""
    share, is_best = 0.0, False
    if drafter == 1 and len(joint.tokens) > 0:
        if position < len(joint.tokens):
            for rank in range(joint.tokens.shape[1]):
                if joint.tokens[position, rank] == token:
                    share, is_best = joint.shares[position, rank], rank == 0
                    break
    elif child >= 0:
        share, is_best = joint.given[child, drafter], child == prediction.best_row
    return share * (prediction.best if is_best else prediction.rest), is_best


@jit_inner
def _mixed(p, q, mixture):  # type: ignore[no-untyped-def]
    """The mixture's probability of a token to which the drafters give p and q."""
    both = p * q / mixture.divisor if p > 0.0 and q > 0.0 else 0.0
    one, two, three = mixture.weights
    return mixture.scale * (one * p + two * q + three * both)


# Columns of a frontier entry, and of a node of the tree. RANK: where the entry stands for a token
# of the marginals and for those after it; SINGLE where it is one child.
ABOVE, DRAFTED, ROW, ON_BEST, RANK, DEPTH = range(6)
SINGLE = -1


@jit
def _search(joint, statistics, limit):  # type: ignore[no-untyped-def]
    """Best-first search of the trie, with the marginals' children behind every path."""
    nodes = np.zeros((limit + 1, 6), np.int64)  # row 0 is the root
    nodes[0, ON_BEST] = 1
    scores, given = np.ones(limit + 1), np.ones(limit + 1)
    # A row of the trie is listed once; of the marginals each path adds the best and the others.
    room = len(joint.trie) + 2 * limit + 4
    keys, items = np.empty(room, np.float64), np.empty(room, np.int64)
    entries = np.empty((room, 6), np.int64)
    chances = np.empty((room, 2), np.float64)  # given the parent; the factor of its siblings
    size, used, taken = np.int64(0), np.int64(0), np.int64(0)
    while taken < limit:
        first = used
        used = _expand(taken, nodes, joint, statistics, (entries, chances), used)
        for entry in range(first, used):
            keys[size], items[size] = scores[taken] * chances[entry, 0], entry
            sift_up(keys, items, size)
            size += 1
        if size == 0:
            break
        taken += 1
        entry = items[0]
        nodes[taken] = entries[entry]
        scores[taken], given[taken] = keys[0], chances[entry, 0]
        if _next_sibling(entries[entry], chances[entry], nodes, joint):
            keys[0] = scores[nodes[taken, ABOVE]] * chances[entry, 0]
        else:
            size -= 1
            keys[0], items[0] = keys[size], items[size]
        if size > 0:
            sift_down(keys, items, size)
    drafted = nodes[1 : taken + 1]
    return drafted[:, DRAFTED].copy(), drafted[:, ABOVE].copy(), given[1 : taken + 1]


@jit_inner
def _expand(parent, nodes, joint, statistics, listed, used):  # type: ignore[no-untyped-def]
    """List the children of a node behind the `used` entries; the new number of entries."""
    row, position, on_best = nodes[parent, ROW], nodes[parent, DEPTH], nodes[parent, ON_BEST] > 0
    mixture = _mixture_behind(row, position, on_best, joint, statistics)
    entries, chances = listed
    child = first_child(joint.trie, row)
    while child >= 0:
        token = joint.trie[child, TOKEN]
        p, _ = _probability(_FIRST, token, child, position, joint, mixture.first)
        q, is_best = _probability(_SECOND, token, child, position, joint, mixture.second)
        chance = _mixed(p, q, mixture)
        if chance > 0.0:
            best = 1 if on_best and is_best else 0
            entries[used] = parent, token, child, best, SINGLE, position + 1
            chances[used, 0] = chance
            used += 1
        child = joint.trie[child, SIBLING]
    for rank in range(2 if position < len(joint.tokens) else 0):
        if rank == 1:
            rank = _unlisted(1, position, row, joint)
        elif child_of(joint.trie, row, joint.tokens[position, 0]) >= 0:
            continue
        if rank >= joint.tokens.shape[1]:
            continue
        calibration = mixture.second.best if rank == 0 else mixture.second.rest
        factor = mixture.scale * mixture.weights[1] * calibration
        if factor * joint.shares[position, rank] > 0.0:
            token, best = joint.tokens[position, rank], 1 if on_best and rank == 0 else 0
            first = SINGLE if rank == 0 else rank
            entries[used] = parent, token, -1, best, first, position + 1
            chances[used, 0], chances[used, 1] = factor * joint.shares[position, rank], factor
            used += 1
    return used


@jit_inner
def _next_sibling(entry, chance, nodes, joint):  # type: ignore[no-untyped-def]
    """Move an entry of the marginals to its next token; False where there is none."""
    if entry[RANK] == SINGLE:
        return False
    position = entry[DEPTH] - 1
    rank = _unlisted(entry[RANK] + 1, position, nodes[entry[ABOVE], ROW], joint)
    if rank >= joint.tokens.shape[1] or not joint.shares[position, rank] > 0.0:
        return False
    entry[RANK], entry[DRAFTED] = rank, joint.tokens[position, rank]
    chance[0] = chance[1] * joint.shares[position, rank]
    return True


@jit_inner
def _unlisted(rank, position, row, joint):  # type: ignore[no-untyped-def]
    """The first rank from `rank` on whose token is no child of `row` in the trie."""
    width = joint.tokens.shape[1]
    while rank < width and child_of(joint.trie, row, joint.tokens[position, rank]) >= 0:
        rank += 1
    return rank


@jit
def learn(emitted, joint, statistics):  # type: ignore[no-untyped-def]
    """Count the emitted tokens [n] as far as a drafter proposes anything behind them."""
    row, on_best = np.int64(0), len(emitted) > 0  # no literal True, which has a type of its own
    for position in range(len(emitted)):
        token = emitted[position]
        mixture = _mixture_behind(row, position, on_best, joint, statistics)
        first, second = mixture.first, mixture.second
        if first.confidence == 0 and second.confidence == 0:
            break
        child = child_of(joint.trie, row, token)
        p, p_is_best = _probability(_FIRST, token, child, position, joint, first)
        q, q_is_best = _probability(_SECOND, token, child, position, joint, second)
        if first.confidence > 0 and second.confidence > 0:
            place = min(position, 1), first.confidence, second.confidence
            _explain(p, q, mixture, statistics.counts[place])
            missed = statistics.missed[place]
            missed[0] = missed[0] * FORGETTING + first.left * second.left
            missed[1] = missed[1] * FORGETTING + (0.0 if p > 0.0 or q > 0.0 else 1.0)
        for drafter in range(2):
            prediction = first if drafter == 0 else second
            if prediction.confidence == 0:
                continue
            is_best, named = (p_is_best, p > 0.0) if drafter == 0 else (q_is_best, q > 0.0)
            others = max(min(prediction.total, 1.0) - prediction.top, 0.0)
            place = drafter, min(position, DEPTHS - 1), prediction.confidence
            predicted, realised = statistics.predicted[place], statistics.realised[place]
            predicted[0] = predicted[0] * FORGETTING + prediction.top
            predicted[1] = predicted[1] * FORGETTING + others
            realised[0] = realised[0] * FORGETTING + (1.0 if is_best else 0.0)
            realised[1] = realised[1] * FORGETTING + (1.0 if named and not is_best else 0.0)
        row, on_best = child, on_best and q_is_best


@jit_inner
def _explain(p, q, mixture, counts):  # type: ignore[no-untyped-def]
    """Share one token among the parts of the mixture: an expectation-maximisation step."""
    first, second, weights, divisor, _ = mixture
    product = p * q / divisor if p > 0.0 and q > 0.0 else 0.0
    left = first.left * second.left / divisor if divisor > 0.0 else 0.0
    one = weights[0] * (p if p > 0.0 else first.left * UNNAMED)
    two = weights[1] * (q if q > 0.0 else second.left * UNNAMED)
    both = weights[2] * (product if product > 0.0 else left * UNNAMED)
    total = one + two + both
    if total > 0.0:
        for part, share in enumerate((one, two, both)):
            counts[part] = counts[part] * FORGETTING + share / total
