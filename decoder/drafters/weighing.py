"""How much two drafters' words on the token behind a path are worth together.

Each source's probabilities are corrected by how often they came true, and three mixed: the
first's, the second's, and those of both as independent witnesses,

    both(x) = p(x) q(x) / (sum over common tokens of p q + (1 - sum p) (1 - sum q)),

whose last term is the case that neither names the token. `decoder.drafters.trust` learns the
corrections and the weights of the mixture. A mixture of two that name different tokens names
no more than the better one of them, though either may be right: so it is scaled to the sum

    1 - r (1 - sum p) (1 - sum q),

where r is 1 as long as both miss a token independently; how often both did, over that, is
learnt as well. Where a source is silent, the other's corrected probabilities hold. Children
of one path never sum to more than 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from decoder.drafters.evidence import CHILD, SIBLING, TOKEN
from decoder.jit import jit

EDGES = (0.3, 0.6, 0.85)  # of the confidence classes: the largest probability behind a path
SURE = len(EDGES) + 1
# A source is silent (0), in a confidence class, or in one of those off the marginals' own best
# path: what a block drafter says of a position supposes its best tokens at those before.
KINDS = 1 + 2 * SURE
DEPTHS = 4  # corrections are kept apart for depths 1, 2, 3, and 4 or more
PRIOR = 4.0  # pseudo-observations of a source that is right about itself
MISSES_PRIOR = 1.0  # pseudo-observations of a token that both miss, independently


class Said(NamedTuple):
    """What a source says behind a path: the largest probability, the sum, its kind, and the
    row of its best child where that is of its tree, else -1.
    """

    top: Any
    total: Any
    kind: Any
    best: Any


class Worth(NamedTuple):
    """How the tokens behind a path are weighed; plain numbers all.

    one, two, both  weights of the mixture's parts
    best_a, rest_a        corrections of the first source's best child and of its others
    left_a                what it leaves to tokens that it does not name; the second's likewise
    divisor               of the part `both`
    scale                 of the mixture, so that the tokens which it names have their share
    """

    said_a: Any
    said_b: Any
    one: Any
    two: Any
    both: Any
    best_a: Any
    rest_a: Any
    left_a: Any
    best_b: Any
    rest_b: Any
    left_b: Any
    divisor: Any
    scale: Any


@jit
def weigh(row, position, on_best, evidence, known):  # type: ignore[no-untyped-def]
    """How to weigh the tokens at a position (0: below the root) behind a path.

    row      of the path in the trie, -1 where it has left it
    on_best  whether all its tokens are the best of their positions in the marginals
    known    the arrays of `Trust` and the factors of `Lean`
    """
    trie, says, tokens, shares, totals = evidence
    (predicted, realised, counts, missed), lean = known
    said_a = _tree_says(trie, says, row, 0, True)
    if tokens.shape[0] > 0:
        said_b = _marginals_say(shares, totals, position, on_best)
    else:
        said_b = _tree_says(trie, says, row, 1, True)
    level, below = min(position, DEPTHS - 1), min(position, 1)
    best_a, rest_a, left_a = _corrections(
        said_a, predicted[0, level, said_a.kind], realised[0, level, said_a.kind]
    )
    best_b, rest_b, left_b = _corrections(
        said_b, predicted[1, level, said_b.kind], realised[1, level, said_b.kind]
    )
    one, two, both = _mixture(
        said_a.kind, said_b.kind, counts[below, said_a.kind, said_b.kind], lean
    )
    corrected = best_a, rest_a, left_a, best_b, rest_b, left_b
    worth = Worth(said_a, said_b, one, two, both, *corrected, 1.0, 1.0)
    if said_a.kind == 0 or said_b.kind == 0:
        return worth
    divisor = left_a * left_b
    child = trie[row, CHILD] if row >= 0 else np.int64(-1)
    while child >= 0:
        p = first_says(child, evidence, worth)
        if p > 0.0:
            divisor += p * second_says(trie[child, TOKEN], child, position, evidence, worth)[0]
        child = trie[child, SIBLING]
    neither = missed_by_both(missed[below, said_a.kind, said_b.kind], left_a, left_b)
    named = one * (1.0 - left_a) + two * (1.0 - left_b)
    if divisor > 0.0:
        named += both * (1.0 - left_a * left_b / divisor)
    scale = (1.0 - neither) / named if named > 0.0 else 1.0
    return Worth(said_a, said_b, one, two, both, *corrected, divisor, scale)


@jit
def missed_by_both(missed, left_a, left_b):  # type: ignore[no-untyped-def]
    """Probability of a token that neither source names.

    missed  [2] such tokens so far: expected of independent sources, and realised
    """
    ratio = (missed[1] + MISSES_PRIOR) / (missed[0] + MISSES_PRIOR)
    return min(ratio * left_a * left_b, 1.0)


@jit
def first_says(child, evidence, worth):  # type: ignore[no-untyped-def]
    """The first source's corrected probability of a row of the trie (-1: 0)."""
    if child < 0:
        return 0.0
    return evidence[1][child, 0] * (worth.best_a if child == worth.said_a.best else worth.rest_a)


@jit
def second_says(token, child, position, evidence, worth):  # type: ignore[no-untyped-def]
    """The second source's corrected probability of a token, and whether it is its best.

    child  the token's row in the trie, or -1
    """
    _, says, tokens, shares, _ = evidence
    if tokens.shape[0] == 0:
        is_best = child >= 0 and child == worth.said_b.best
        share = says[child, 1] if child >= 0 else 0.0
    else:
        rank = _rank_of(tokens, position, token)
        is_best = rank == 0
        share = shares[position, rank] if rank >= 0 else 0.0
    return share * (worth.best_b if is_best else worth.rest_b), is_best


@jit
def witnessed(p, q, worth):  # type: ignore[no-untyped-def]
    """Probability of a token to which two independent witnesses give p and q."""
    return p * q / worth.divisor if p > 0.0 and q > 0.0 else 0.0


@jit
def mixed(p, q, worth):  # type: ignore[no-untyped-def]
    """The mixture's probability of a token to which the sources give p and q."""
    return worth.scale * (worth.one * p + worth.two * q + worth.both * witnessed(p, q, worth))


@jit
def _tree_says(trie, says, row, source, on_best):  # type: ignore[no-untyped-def]
    top, total, best = 0.0, 0.0, np.int64(-1)
    child = trie[row, CHILD] if row >= 0 else np.int64(-1)
    while child >= 0:
        share = says[child, source]
        total += share
        if share > top:
            top, best = share, child
        child = trie[child, SIBLING]
    return Said(top, total, _kind(top, on_best), best)


@jit
def _marginals_say(shares, totals, position, on_best):  # type: ignore[no-untyped-def]
    if position >= shares.shape[0] or shares.shape[1] == 0:
        return Said(0.0, 0.0, 0, np.int64(-1))
    top = shares[position, 0]
    return Said(top, totals[position], _kind(top, on_best), np.int64(-1))


@jit
def _rank_of(tokens, position, token):  # type: ignore[no-untyped-def]
    if position < tokens.shape[0]:
        for rank in range(tokens.shape[1]):
            if tokens[position, rank] == token:
                return rank
    return -1


@jit
def _kind(top, on_best):  # type: ignore[no-untyped-def]
    """The kind of a source whose largest probability is `top`."""
    if top <= 0.0:
        return 0
    level = 1
    for edge in EDGES:
        level += 1 if top >= edge else 0
    return level if on_best else level + SURE


@jit
def _corrections(said, predicted, realised):  # type: ignore[no-untyped-def]
    """Factors of a source's best child and of its others, and what they leave, 0 or more.

    predicted, realised  [2] hits so far of such best children and others
    """
    best = (realised[0] + PRIOR) / (predicted[0] + PRIOR)
    rest = (realised[1] + PRIOR) / (predicted[1] + PRIOR)
    mass = best * said.top + rest * max(said.total - said.top, 0.0)
    if mass <= 1.0:
        return best, rest, 1.0 - mass
    return best / mass, rest / mass, 0.0


@jit
def _mixture(kind_a, kind_b, counts, lean):  # type: ignore[no-untyped-def]
    """Weights of the first, of the second, and of both as witnesses; they sum to 1.

    counts  [3] tokens that each part explained where the sources were of these kinds
    """
    if kind_a == 0 or kind_b == 0:
        return (1.0 if kind_a > 0 else 0.0), (1.0 if kind_b > 0 else 0.0), 0.0
    one, two, both = counts[0] * lean[0], counts[1] * lean[1], counts[2] * lean[2]
    total = one + two + both
    return one / total, two / total, both / total
