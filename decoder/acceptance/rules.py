"""Exact acceptance rules: which drafted tokens the target accepts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite
from typing import Literal, Protocol, cast, get_args

import numpy as np
import torch

from costmodel.errors import InputError
from costmodel.statistics import Array, Ints
from decoder.acceptance.drawn import DrawnTree, RankExpectation, draw_from_lattice, least_kept
from decoder.acceptance.sampling import RunningEntropy, Sampling, TokenDraws, target_distribution
from decoder.device import to_device
from decoder.model.runtime.base import NO_TOKEN
from decoder.model.runtime.eager import greedy_tokens
from decoder.tree.draft_tree import DraftTree, Lattice

RuleName = Literal["walk", "recursive", "traversal", "auto"]

# Nats; below it deterministic trees accept more. With a poor drafter the rules cross at 0.59 and
# 0.66, with a good one at 0.15 (lab/studies/results/acceptance_rules.json).
ENTROPY_THRESHOLD = 0.6


@dataclass(frozen=True, slots=True)
class Accepted:
    """The outcome of one verification.

    rows    accepted rows of the forward, in path order, without the root
    tokens  of these rows
    bonus   the target's own token after the last accepted row; root of the next tree.
            `NO_TOKEN` where the logits of that row are not numbers
    """

    rows: list[int]
    tokens: list[int]
    bonus: int


class RandomChoices(Protocol):
    """The random choices of an acceptance rule, as made by `SeededChoices`."""

    def distribution(self, logits: torch.Tensor) -> torch.Tensor:
        """The target's distribution [vocab] of a row of logits, after top-k and top-p."""

    def happens(self, probability: float) -> bool:
        """True with this probability."""

    def one_of(self, weights: torch.Tensor) -> int:
        """An index drawn in proportion to weights [vocab]."""


class SeededChoices:
    """The random choices of one sequence, with a generator of its own.

    entropy  collects the entropy of every distribution used; None: not needed
    """

    def __init__(
        self, sampling: Sampling, device: torch.device, entropy: RunningEntropy | None = None
    ) -> None:
        self.sampling = sampling
        self.generator = torch.Generator(device=device)
        self.generator.manual_seed(sampling.seed)
        # `happens` draws on the host, since each answer of a device would be waited for.
        self._coins = self.generator
        if device.type != "cpu":
            self._coins = torch.Generator().manual_seed(sampling.seed)
        self._entropy = entropy
        self.draws = TokenDraws(sampling, self.generator, entropy)

    def __call__(self, logits: torch.Tensor) -> int:
        """The target's own token of a visited row, logits [vocab], in one copy to the host."""
        if self.sampling.temperature == 0.0 and logits.dtype == torch.float32 and logits.is_cpu:
            row = logits.numpy()  # whose argmax, the same, takes a tenth of torch's time
            token = int(row.argmax())
            return token if isfinite(row[token]) else NO_TOKEN
        if self.sampling.temperature == 0.0:
            return int(greedy_tokens(logits))
        return self.draws.of_row(logits)

    def distribution(self, logits: torch.Tensor) -> torch.Tensor:
        """The target's distribution at T > 0, float32 [vocab], of logits [vocab]."""
        probabilities = target_distribution(logits, self.sampling)
        if self._entropy is not None:
            self._entropy.add(probabilities)
        return probabilities

    def happens(self, probability: float) -> bool:
        """True with this probability: always at 1, never at 0."""
        return float(torch.rand(1, generator=self._coins, dtype=torch.float64)) < probability

    def one_of(self, weights: torch.Tensor) -> int:
        """An index drawn in proportion to weights [vocab], float64, not negative.

        `NO_TOKEN` for weights that are not numbers.
        """
        cumulative = weights.cumsum(0, dtype=torch.float64)
        uniform = torch.rand(
            1, generator=self.generator, device=self.generator.device, dtype=torch.float64
        )
        # uniform < 1, so the place lies below the total, and only weights above 0 can be hit.
        place = uniform.to(weights.device) * cumulative[-1]
        column = torch.searchsorted(cumulative, place, right=True)
        token, total = torch.cat((column.double(), cumulative[-1:])).tolist()
        return int(token) if token < len(weights) and isfinite(total) else NO_TOKEN


class LogitRows(Protocol):
    """The logits [rows, vocab] of a verification: a tensor, or rows that are made when read."""

    def __getitem__(self, row: int, /) -> torch.Tensor: ...


def walk(tree: DraftTree, logits: LogitRows, pick: Callable[[torch.Tensor], int]) -> Accepted:
    """Follow the target's own draws down a tree.

    At each visited row the target draws its token (argmax at T = 0). If a child carries the
    token, the walk descends to it; otherwise the token is the bonus token. This is exact at
    any temperature, since every emitted token is the target's own draw and the tree does not
    depend on it. No exact rule accepts more of a deterministic tree. Only visited rows are
    processed.

    logits  [rows, vocab] of the verification forward
    """
    return _follow(tree, lambda row: pick(logits[row]))


def walk_tokens(tree: DraftTree, tokens: Ints) -> Accepted:
    """`walk` with the target's token after every row, int64 [rows], on the host."""
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


def recursive_rejection(tree: DrawnTree, logits: LogitRows, choices: RandomChoices) -> Accepted:
    """Accept or reject each child in draw order, from the root down.

    Child x is accepted with probability min(1, p(x) / q(x)). On rejection, p becomes
    [p - q]+ normalised; x is removed from q, which is normalised again. After the last
    rejection the bonus token is drawn from p. This is exact for children drawn without
    replacement. Only visited rows are processed.

    logits  [rows, vocab] of the verification forward
    """
    path = [_Node(tree, logits, choices, row=0, share=1.0)]
    while (child := path[-1].next_child()) is not None:
        row, share = child
        if choices.happens(share):
            path.append(_Node(tree, logits, choices, row=row, share=1.0))
        else:
            path[-1].reject()
    return _outcome(tree, path)


def traversal(tree: DrawnTree, logits: LogitRows, choices: RandomChoices) -> Accepted:
    """Accept or reject whole paths, from the leaves up (traversal verification).

    Node c below v carries r(c) = min(1, r(v) p(c) / q(c)), the root r = 1. The first leaf in
    draw order is accepted, with the path to it, with probability r. Otherwise it is removed;
    at its parent u, with d = [r p - q]+ and S = sum d, p becomes d / S, r becomes
    S / (S + 1 - r), and q loses the leaf. A parent without children is then a leaf itself.
    This is exact for children drawn without replacement, and accepts at least as much as
    recursive rejection on average. Only rows that the search reaches are processed.

    logits  [rows, vocab] of the verification forward
    """
    path = [_Node(tree, logits, choices, row=0, share=1.0)]
    while True:
        child = path[-1].next_child()
        if child is None:
            if len(path) == 1 or choices.happens(path[-1].kept):
                return _outcome(tree, path)
            path.pop()
            path[-1].reject()
        elif child[1] > 0.0:
            path.append(_Node(tree, logits, choices, row=child[0], share=child[1]))
        else:  # nothing below it can be accepted
            path[-1].reject()


class _Node:
    """A node on the examined path, with the rest of the target's distribution there.

    After j rejected children both rules need r_j p_j (in recursive rejection r is 1). It has a
    closed form: with the p, q and r of the start, Q_j the mass of q without the j tokens, and
    t_0 = 0,
        r_j p_j = [r p - t_j q]+ / Z_j,  Z_j = D(t_j) + 1 - r,  D(t) = sum [r p - t q]+,
        t_(j+1) = t_j + Z_j / Q_j,       r_j = D(t_j) / Z_j.
    By induction: [r_j p_j - q_j]+ is [r p - t_j q - (Z_j / Q_j) q]+ / Z_j at tokens still in
    q, and 0 at the removed ones, where r p < t q already: a child x is only ever rejected if
    r_j p_j(x) < q_j(x). With S = D(t_(j+1)) / Z_j the rule's p = d / S, r = S / (S + 1 - r_j)
    give r_(j+1) p_(j+1) = [r p - t_(j+1) q]+ / (Z_j (S + 1 - r_j)), and that denominator is
    D(t_(j+1)) + Z_j - D(t_j) = Z_(j+1). So a rejected child costs one pass over the
    vocabulary, and t is the only state. Sums are in float64.

    At r = 1, D is 0 only if p = q at every remaining token, and then no child is rejected. If
    rounding makes it 0 (probability about 1e-16), the target's own p is used.
    """

    def __init__(
        self, tree: DrawnTree, logits: LogitRows, choices: RandomChoices, *, row: int, share: float
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
        # q may be on another device, and lack the padding of the target's vocabulary.
        self._q = torch.zeros_like(self._p)
        q = tree.q[int(tree.sources[self.row])]
        self._q[: len(q)] = _normalised(q)
        tokens = to_device(tree.tokens[self._rows - 1], self._q.device)
        self._child_weights, self._child_q = torch.stack(
            (self._weights[tokens], self._q[tokens])
        ).tolist()
        # Q: the mass of q without the rejected children, at least that of the remaining ones.
        if not isfinite(sum(self._child_weights)):
            # The path ends here in any case, and its bonus is `NO_TOKEN`.
            self._rows, self._share, self._left = self._rows[:0], 1.0, 1.0
            return
        rejected = [0.0, *accumulate(self._child_q)]
        remaining = [*accumulate(reversed(self._child_q))]
        self._free = [max(1.0 - a, b) for a, b in zip(rejected, reversed(remaining), strict=False)]

    @property
    def _divisor(self) -> float:  # Z
        return self._left + (1.0 - self._share)

    @property
    def kept(self) -> float:
        """The present r of this node: the probability that it is accepted as a leaf."""
        return min(1.0, self._left / self._divisor) if self._divisor > 0.0 else 1.0

    def next_child(self) -> tuple[int, float] | None:
        """The first child not yet rejected and its min(1, r p(x) / q(x)); None after the last."""
        if self._next == len(self._rows):
            return None
        weight = self._child_weights[self._next] - self._subtracted * self._child_q[self._next]
        if weight <= 0.0 or self._divisor <= 0.0:
            return int(self._rows[self._next]), 0.0
        ratio = weight / self._divisor * self._free[self._next] / self._child_q[self._next]
        return int(self._rows[self._next]), min(1.0, ratio)

    def reject(self) -> None:
        """Remove the child that `next_child` returned."""
        self._subtracted += self._divisor / self._free[self._next]
        self._left = float((self._weights - self._subtracted * self._q).clamp_min_(0.0).sum())
        self._next += 1

    def bonus(self) -> int:
        """A token drawn from the rest of the target's distribution."""
        if not len(self._rows):
            return self._choices.one_of(_normalised(self._choices.distribution(self._logits)))
        if self._left <= 0.0:
            return self._choices.one_of(self._p)
        left = (self._weights - self._subtracted * self._q).clamp_min_(0.0)
        return self._choices.one_of(left)


def _normalised(probabilities: torch.Tensor) -> torch.Tensor:
    exact = probabilities.double()
    return exact / exact.sum()


def _outcome(tree: DrawnTree, path: list[_Node]) -> Accepted:
    rows = [node.row for node in path[1:]]
    tokens = [int(tree.tokens[row - 1]) for row in rows]
    return Accepted(rows, tokens, path[-1].bonus())


def parse_rule(name: str, drafter: str, *, draws: bool) -> RuleName:
    """The rule of this name, for a drafter.

    drafter  its name
    draws    whether trees can be drawn from its distribution; if not, `auto` is `walk`
    Raises InputError for an unknown rule, and for one that the drafter cannot serve.
    """
    if name not in get_args(RuleName):
        raise InputError(
            f"'{name}' is not an acceptance rule", hint="Use walk, recursive, traversal or auto."
        )
    if draws:
        return cast(RuleName, name)
    if name in ("recursive", "traversal"):
        raise InputError(
            f"{name} acceptance needs a drafter with a distribution over the whole vocabulary, "
            f"and the {drafter} drafter has none",
            hint="Use --acceptance walk, or auto.",
        )
    return "walk"


class AcceptanceRule:
    """The acceptance rule of one sequence.

    `walk` follows the target's own draws down a deterministic tree. `recursive` and
    `traversal` judge trees drawn from q. `auto` walks while the mean entropy of the target's
    recent distributions is below `ENTROPY_THRESHOLD`, and takes traversal verification
    otherwise. At T = 0 every rule walks. Each decision depends on past rounds of this
    sequence alone, so a seed gives the same text again if the policy chooses the same shapes.

    The round calls `wants_drawn` before drafting. If it is true, the policy chooses the shape
    from `expected(...)` instead of the candidates, and `drawn` gives the shape its tokens.
    """

    def __init__(self, name: RuleName, sampling: Sampling, device: torch.device) -> None:
        if sampling.temperature == 0.0:
            name = "walk"
        self._fixed = name
        self._entropy = RunningEntropy() if name == "auto" else None
        self._sampling = sampling
        self._expectation = RankExpectation()
        self.pick = SeededChoices(sampling, device, self._entropy)

    @property
    def name(self) -> str:
        """The rule of the coming round: walk, recursive or traversal."""
        if self._entropy is None:
            return self._fixed
        entropy = self._entropy.mean()
        return "traversal" if entropy is not None and entropy >= ENTROPY_THRESHOLD else "walk"

    @property
    def greedy(self) -> bool:
        """Whether the target's token is always the argmax of its row."""
        return self._sampling.temperature == 0.0

    def wants_drawn(self) -> bool:
        """Whether this round's tree is to be drawn from q; called before drafting."""
        return self.name != "walk"

    def expected(self, candidates: Lattice) -> Lattice:
        """The policy's candidates for the shape of a drawn tree.

        Token j is the j-th draw, and its probability the expected acceptance.
        """
        if candidates.tokens.size == 0:
            return candidates
        return self._expectation.lattice(candidates.probabilities[:, 0], candidates.tokens.shape[1])

    def expected_by_depth(self, depth: int, width: int) -> Lattice:
        """The same for a drafter that draws level by level, so that its q is not known yet."""
        return self._expectation.lattice(self._expectation.usual_confidences(depth), width)

    def drawn(self, shape: DraftTree, candidates: Lattice) -> DraftTree:
        """The tree of this shape with tokens drawn from `candidates.whole`.

        If top-k or top-p cuts the target's distribution, q is cut too, since draws beyond the
        cut would be rejected. (Any q is exact if the acceptance ratio uses the same.)
        """
        whole = candidates.whole
        cut = least_kept(candidates.probabilities, self._sampling)
        if cut.any():
            lowest = to_device(cut, whole.device).to(whole.dtype)
            whole = torch.where(whole >= lowest[:, None], whole, 0.0)
        return draw_from_lattice(shape, whole, self.pick.generator)

    def tokens(self, tree: DraftTree, logits: torch.Tensor) -> torch.Tensor:
        """The target's tokens of all rows, and entropies, float64 [2, rows]; no wait."""
        if self.greedy:
            return greedy_tokens(logits).double().expand(2, -1)
        return self.pick.draws.of_tree(tree.row_depths(), logits)

    def accept(self, tree: DraftTree, logits: LogitRows, tokens: Array | None = None) -> Accepted:
        """Accept rows of a tree, and learn from the outcome.

        A tree that was not drawn is walked; tokens are those of `tokens`, on the host.
        """
        if not isinstance(tree, DrawnTree):
            if tokens is None:
                return walk(tree, logits, self.pick)
            return _follow(tree, lambda row: self.pick.draws.visit(tokens, row, logits))
        judge = recursive_rejection if self._fixed == "recursive" else traversal
        outcome = judge(tree, logits, self.pick)
        self._expectation.observe(tree, outcome.rows)
        return outcome


def accept_together(
    rules: Sequence[AcceptanceRule],
    trees: Sequence[DraftTree],
    logits: Sequence[LogitRows],
    chosen: Callable[[], Ints | None] | None = None,
) -> list[Accepted]:
    """The outcome of each tree; logits [rows, vocab] of each verification.

    chosen  gives the greedy tokens of all rows, if the forward has chosen them

    An accelerator copies the tokens of all rows of walked trees to the host at once. A CPU
    processes visited rows only, as is done with drawn trees and where rows are processed.
    """
    tensors = [rows for rows in logits if isinstance(rows, torch.Tensor)]
    together = len(tensors) == len(logits) and all(rule.greedy for rule in rules)
    tokens = chosen() if together and chosen is not None else None
    if tokens is not None:
        parts = np.split(tokens, np.cumsum([len(rows) for rows in tensors])[:-1])
        return [walk_tokens(tree, part) for tree, part in zip(trees, parts, strict=True)]
    made, ends = [], [0]
    for rule, tree, rows in zip(rules, trees, logits, strict=True):
        if isinstance(rows, torch.Tensor) and argmax_at_once(rows.device):
            made += [] if isinstance(tree, DrawnTree) else [rule.tokens(tree, rows)]
        ends.append(sum(part.shape[1] for part in made))
    host = torch.cat(made, 1).cpu().numpy() if made else np.empty((2, 0))
    return [
        rule.accept(tree, rows, host[:, first:end] if end > first else None)
        for rule, tree, rows, first, end in zip(rules, trees, logits, ends, ends[1:], strict=False)
    ]


def argmax_at_once(device: torch.device) -> bool:
    """False on a CPU, where a copy does not wait and each row costs a pass over the vocabulary."""
    return device.type != "cpu"
