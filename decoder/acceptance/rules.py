"""Which drafted tokens the target accepts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from decoder.acceptance.drawn import DrawnTree
from decoder.device import to_device
from decoder.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Accepted:
    """The outcome of one verification.

    rows    accepted rows of the forward, in path order, without the root
    tokens  their tokens
    bonus   the target's own token after the last accepted row; root of the next tree
    """

    rows: list[int]
    tokens: list[int]
    bonus: int


class Choices(Protocol):
    """The random choices of a rule; `decoder.acceptance.sampling.Picker` makes them."""

    def distribution(self, logits: torch.Tensor) -> torch.Tensor:
        """The target's distribution [vocab] of a row of logits, after top-k and top-p."""

    def happens(self, probability: float) -> bool:
        """True with this probability."""

    def one_of(self, weights: torch.Tensor) -> int:
        """An index drawn in proportion to weights [vocab]."""


def walk(tree: DraftTree, logits: torch.Tensor, pick: Callable[[torch.Tensor], int]) -> Accepted:
    """Follow the target's own draws down a tree.

    At each visited row the target draws its token (argmax at T = 0). If a child
    carries it, descend; otherwise it is the bonus token. Exact at any temperature,
    because every emitted token is the target's own draw and the tree does not
    depend on it; only visited rows are processed. For a deterministic tree no exact
    rule accepts more.

    logits  [rows, vocab] of the verification forward
    """
    return _follow(tree, lambda row: pick(logits[row]))


def walk_tokens(tree: DraftTree, tokens: NDArray[np.int64]) -> Accepted:
    """`walk` where the target's token after every row, int64 [rows], is on the host already."""
    return _follow(tree, lambda row: int(tokens[row]))


def _follow(tree: DraftTree, token_after: Callable[[int], int]) -> Accepted:
    rows: list[int] = []
    tokens: list[int] = []
    row = 0
    while True:
        token = token_after(row)
        child = tree.child(row, token)
        if child < 0:
            return Accepted(rows, tokens, token)
        rows.append(child)
        tokens.append(token)
        row = child


def recursive_rejection(tree: DrawnTree, logits: torch.Tensor, choices: Choices) -> Accepted:
    """Accept or reject each child in draw order, from the root down.

    Child x is accepted with probability min(1, p(x) / q(x)); on rejection p becomes
    [p - q]+ normalised and x leaves q, which is normalised again. When all children are
    rejected, the bonus token is drawn from p. Exact for children drawn without replacement;
    only visited rows are processed.

    logits  [rows, vocab] of the verification forward
    """
    path = [_Node(tree, logits, choices, row=0, share=1.0)]
    while (child := path[-1].next_child()) is not None:
        row, share = child
        if choices.happens(share):
            path.append(_Node(tree, logits, choices, row=row, share=1.0))
        else:
            path[-1].reject()
    return _outcome(tree, path, choices)


def traversal(tree: DrawnTree, logits: torch.Tensor, choices: Choices) -> Accepted:
    """Accept or reject whole paths, from the leaves up (traversal verification).

    Node c below v carries r(c) = min(1, r(v) p(c) / q(c)), the root r = 1. The first leaf in
    draw order is accepted, with the path to it, with probability r. Otherwise it is removed;
    at its parent u, with d = [r p - q]+ and S = sum d, p becomes d / S, r becomes
    S / (S + 1 - r), and q loses the leaf. A parent without children is a leaf in turn. Exact
    for children drawn without replacement, and on average accepts at least what recursive
    rejection does; rows are processed as the search reaches them.

    logits  [rows, vocab] of the verification forward
    """
    path = [_Node(tree, logits, choices, row=0, share=1.0)]
    while True:
        child = path[-1].next_child()
        if child is None:
            if len(path) == 1 or choices.happens(path[-1].kept):
                return _outcome(tree, path, choices)
            path.pop()
            path[-1].reject()
        elif child[1] > 0.0:
            path.append(_Node(tree, logits, choices, row=child[0], share=child[1]))
        else:  # nothing below it could be accepted either
            path[-1].reject()


class _Node:
    """A node under examination: what is left of the target's distribution there.

    Both rules need, after j rejected children, r_j p_j (r stays 1 in recursive rejection).
    Repeated subtraction is not needed for it: with p, q of the start, Q_j the mass of q
    without the j tokens, and t_0 = 0,
        r_j p_j = [r p - t_j q]+ / Z_j,  Z_j = D(t_j) + 1 - r,  D(t) = sum [r p - t q]+,
        t_(j+1) = t_j + Z_j / Q_j,       r_j = D(t_j) / Z_j.
    By induction: [r_j p_j - q_j]+ is [r p - t_j q - (Z_j / Q_j) q]+ / Z_j at tokens still in
    q, and 0 at the removed ones, where r p < t q already: a child x is only ever rejected if
    r_j p_j(x) < q_j(x). With S = D(t_(j+1)) / Z_j the rule's p = d / S, r = S / (S + 1 - r_j)
    give r_(j+1) p_(j+1) = [r p - t_(j+1) q]+ / (Z_j (S + 1 - r_j)), and that denominator is
    D(t_(j+1)) + Z_j - D(t_j) = Z_(j+1). So a rejected child costs one pass over the
    vocabulary and no state but t. Sums are in float64.

    At r = 1, D is 0 only if p = q at every token left, where no child is rejected; should
    rounding bring it about (probability about 1e-16), the target's own p is used.
    """

    def __init__(
        self, tree: DrawnTree, logits: torch.Tensor, choices: Choices, *, row: int, share: float
    ) -> None:
        self.row = row
        self._share = share
        self._logits = logits[row]
        self._choices = choices
        self._next = 0
        self._subtracted = 0.0  # t
        self._left = share  # D(t)
        self._rows = tree.children(row)
        if len(self._rows):
            self._begin(tree)

    def _begin(self, tree: DrawnTree) -> None:
        self._p = _normalised(self._choices.distribution(self._logits))
        self._weights = self._p * self._share
        # q may lie on another device, and leave out the padding of the target's vocabulary.
        self._q = torch.zeros_like(self._p)
        q = tree.q[int(tree.sources[self.row])]
        self._q[: len(q)] = _normalised(q)
        tokens = to_device(tree.tokens[self._rows - 1], self._q.device)
        self._child_weights, self._child_q = torch.stack(
            (self._weights[tokens], self._q[tokens])
        ).tolist()
        # Q: the mass of q without the rejected children, never below that of those to come.
        gone = [0.0, *accumulate(self._child_q)]
        to_come = [*accumulate(reversed(self._child_q))]
        self._free = [max(1.0 - a, b) for a, b in zip(gone, reversed(to_come), strict=False)]

    @property
    def _divisor(self) -> float:  # Z
        return self._left + (1.0 - self._share)

    @property
    def kept(self) -> float:
        """r of this node as it stands: the probability that it is accepted as a leaf."""
        return min(1.0, self._left / self._divisor) if self._divisor > 0.0 else 1.0

    def next_child(self) -> tuple[int, float] | None:
        """Row of the first child not yet rejected, and min(1, r p(x) / q(x)); None after all."""
        if self._next == len(self._rows):
            return None
        weight = self._child_weights[self._next] - self._subtracted * self._child_q[self._next]
        if weight <= 0.0 or self._divisor <= 0.0:
            return int(self._rows[self._next]), 0.0
        ratio = weight / self._divisor * self._free[self._next] / self._child_q[self._next]
        return int(self._rows[self._next]), min(1.0, ratio)

    def reject(self) -> None:
        """Remove the child that `next_child` gave."""
        self._subtracted += self._divisor / self._free[self._next]
        self._left = float((self._weights - self._subtracted * self._q).clamp_min_(0.0).sum())
        self._next += 1

    def bonus(self) -> int:
        """A token from what is left of the target's distribution."""
        if not len(self._rows):
            return self._choices.one_of(_normalised(self._choices.distribution(self._logits)))
        if self._left <= 0.0:
            return self._choices.one_of(self._p)
        left = (self._weights - self._subtracted * self._q).clamp_min_(0.0)
        return self._choices.one_of(left)


def _normalised(probabilities: torch.Tensor) -> torch.Tensor:
    exact = probabilities.double()
    return exact / exact.sum()


def _outcome(tree: DrawnTree, path: list[_Node], choices: Choices) -> Accepted:
    rows = [node.row for node in path[1:]]
    tokens = [int(tree.tokens[row - 1]) for row in rows]
    return Accepted(rows, tokens, path[-1].bonus())
