"""Exact acceptance rules: which drafted tokens the target accepts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast, get_args

import numpy as np
import torch

from costmodel.errors import InputError
from costmodel.online import FadingMean
from costmodel.statistics import Array, Ints
from decoder.acceptance.drawn import DrawnTree, RankExpectation, draw_from_lattice, least_kept
from decoder.acceptance.nodes import JudgedRows, LogitRows, RowNumbers, VisitedRows, judge_rows
from decoder.acceptance.sampling import Sampling, SeededChoices, one_of_each, row_distributions
from decoder.device import to_device
from decoder.model.runtime.eager import NO_TOKEN, greedy_tokens
from decoder.tree.draft_tree import DraftTree, Lattice

RuleName = Literal["walk", "recursive", "traversal", "auto"]

# Nats; below it deterministic trees accept more. With a poor drafter the rules cross at 0.59 and
# 0.66, with a good one at 0.15 (lab/studies/results/acceptance_rules.json).
ENTROPY_THRESHOLD = 0.6
ENTROPY_FADING = 0.98  # a distribution


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


def walk(tree: DraftTree, logits: LogitRows, pick: Callable[[torch.Tensor], int]) -> Accepted:
    """Follow the target's own draws down a tree.

    At each visited row the target draws its token (argmax at T = 0). If a child carries the
    token, the walk descends to it; otherwise the token is the bonus token. This is exact at any
    temperature, and no exact rule accepts more of a deterministic tree. Only visited rows of the
    logits [rows, vocab] are processed.
    """
    return _follow(tree, lambda row: pick(logits[row]))


def _follow(tree: DraftTree, token_after: Callable[[int], Any]) -> Accepted:
    rows: list[int] = []
    tokens: list[int] = []
    token, child = int(token_after(0)), 0
    while (child := tree.child(child, token)) >= 0:
        rows.append(child)
        tokens.append(token)
        token = int(token_after(child))
    return Accepted(rows, tokens, token)


def recursive_rejection(tree: DrawnTree, rows: RowNumbers, choices: SeededChoices) -> Accepted:
    """Accept or reject each child in draw order, from the root down.

    Child x is accepted with probability min(1, p(x) / q(x)). On rejection, p becomes
    [p - q]+ normalised; x is removed from q, which is normalised again. After the last
    rejection the bonus token is drawn from p. This is exact for children drawn without
    replacement. `rows` have an r of 1 everywhere.
    """
    path, rank, children = [0], 0, tree.child_rows()
    while rank < len(children[path[-1]]):
        if choices.happens(rows.share(path[-1], rank)):
            path.append(children[path[-1]][rank])
            rank = 0
        else:
            rank += 1
    return _outcome(tree, path, rows)


def traversal(tree: DrawnTree, rows: RowNumbers, choices: SeededChoices) -> Accepted:
    """Accept or reject whole paths, from the leaves up (traversal verification).

    Node c below v carries r(c) = min(1, r(v) p(c) / q(c)), the root r = 1. The first leaf in
    draw order is accepted, with the path to it, with probability r. Otherwise it is removed;
    at its parent u, with d = [r p - q]+ and S = sum d, p becomes d / S, r becomes
    S / (S + 1 - r), and q loses the leaf. A parent without children is then a leaf itself.
    This is exact for children drawn without replacement, and accepts at least as much as
    recursive rejection on average. Only rows that the search reaches are processed.
    """
    path, ranks, children = [0], [0], tree.child_rows()
    while True:
        row, rank = path[-1], ranks[-1]
        if rank == len(children[row]):
            if len(path) == 1 or choices.happens(rows.kept(row)):
                return _outcome(tree, path, rows)
            path.pop()
            ranks.pop()
            ranks[-1] += 1
        elif rows.share(row, rank) > 0.0:
            path.append(children[row][rank])
            ranks.append(0)
        else:  # nothing below it can be accepted
            ranks[-1] += 1


def _outcome(tree: DrawnTree, path: list[int], rows: RowNumbers) -> Accepted:
    tokens = [int(tree.tokens[row - 1]) for row in path[1:]]
    return Accepted(path[1:], tokens, rows.token(path[-1]))


def parse_rule(name: str, drafter: str, *, draws: bool) -> RuleName:
    """The rule of this name, for the drafter of a name.

    draws  whether trees can be drawn from the drafter's q; if not, `auto` is `walk`
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
    recent distributions is below `ENTROPY_THRESHOLD`, and else takes traversal verification. At
    T = 0 every rule walks. Each decision depends on past rounds of this sequence alone, so a
    seed gives the same text again if the policy chooses the same shapes.

    If `wants_drawn` is true before drafting, the policy chooses the shape from `expected(...)`
    instead of the candidates, or from the `expectation` where q is not known yet, and `drawn`
    gives the shape its tokens.
    """

    def __init__(self, name: RuleName, sampling: Sampling, device: torch.device) -> None:
        if sampling.temperature == 0.0:
            name = "walk"
        self._fixed = name
        self._entropy = FadingMean(ENTROPY_FADING) if name == "auto" else None
        self._sampling = sampling
        self._whole_paths = name != "recursive"
        self.expectation = RankExpectation()
        self.choices = SeededChoices(sampling, device, self._entropy)

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

    def pick(self, logits: torch.Tensor) -> int:
        """The target's own token of a visited row, logits [vocab]."""
        return int(greedy_tokens(logits)) if self.greedy else self.choices(logits)

    def wants_drawn(self) -> bool:
        """Whether this round's tree is to be drawn from q; called before drafting."""
        return self.name != "walk"

    def expected(self, candidates: Lattice) -> Lattice:
        """The policy's candidates for the shape of a drawn tree, see `RankExpectation.lattice`."""
        if candidates.tokens.size == 0:
            return candidates
        return self.expectation.lattice(candidates.probabilities[:, 0], candidates.tokens.shape[1])

    def drawn(self, shape: DraftTree, candidates: Lattice) -> DraftTree:
        """The tree of this shape, drawn from `candidates.whole`, which top-k and top-p cut."""
        whole = candidates.whole
        cut = least_kept(candidates.probabilities, self._sampling)
        if cut.any():
            lowest = to_device(cut, whole.device).to(whole.dtype)
            whole = torch.where(whole >= lowest[:, None], whole, 0.0)
        return draw_from_lattice(shape, whole, self.choices.generator)

    def ahead(self, tree: DraftTree, logits: torch.Tensor) -> torch.Tensor:
        """What `accept` needs of all rows, float64 [numbers, rows] on their device; no wait."""
        if self.greedy:
            return greedy_tokens(logits).double().expand(2, -1)
        if not isinstance(tree, DrawnTree):
            return self.choices.of_tree(tree.row_depths(), logits)
        return judge_rows(
            tree,
            lambda rows: row_distributions(logits.index_select(0, rows), self._sampling),
            partial(one_of_each, uniform=self.choices.uniform()),
            device=logits.device,
            whole_paths=self._whole_paths,
        )

    def accept(self, tree: DraftTree, logits: Any, ahead: Array | None = None) -> Accepted:
        """Accept rows, and learn from them; without `ahead`, by the logits of visited rows."""
        if not isinstance(tree, DrawnTree):
            if ahead is None:
                return walk(tree, logits, self.pick)
            return _follow(tree, lambda row: self.choices.visit(ahead, row, logits))
        rows: RowNumbers = VisitedRows(tree, logits, self.choices, whole_paths=self._whole_paths)
        if ahead is not None and NO_TOKEN not in ahead[2]:
            rows = JudgedRows(tree, ahead)
        rule = traversal if self._whole_paths else recursive_rejection
        outcome = rule(tree, rows, self.choices)
        if self._entropy is not None and isinstance(rows, JudgedRows):
            for entropy in rows.entropies():
                self._entropy.add(entropy)
        self.expectation.observe(tree, outcome.rows, rows.confidence)
        return outcome


def accept_together(
    rules: Sequence[AcceptanceRule],
    trees: Sequence[DraftTree],
    logits: Sequence[LogitRows],
    chosen: Callable[[], Ints | None] | None = None,
) -> list[Accepted]:
    """The outcome of each tree; logits [rows, vocab] of each verification.

    chosen  gives the greedy tokens of all rows, if the forward has chosen them

    An accelerator copies what the rules need of all rows to the host at once. A CPU, where a
    copy does not wait, processes visited rows only, as for `LogitRows` made when read.
    """
    tensors = [rows for rows in logits if isinstance(rows, torch.Tensor)]
    together = len(tensors) == len(logits) and all(rule.greedy for rule in rules)
    tokens = chosen() if together and chosen is not None else None
    if tokens is not None:
        parts = np.split(tokens, np.cumsum([len(rows) for rows in tensors])[:-1])
        return [_follow(tree, part.__getitem__) for tree, part in zip(trees, parts, strict=True)]
    made = [
        rule.ahead(tree, rows)
        if isinstance(rows, torch.Tensor) and argmax_at_once(rows.device)
        else None
        for rule, tree, rows in zip(rules, trees, logits, strict=True)
    ]
    flat = [numbers.flatten() for numbers in made if numbers is not None]
    host = torch.cat(flat).cpu().numpy() if flat else np.empty(0)
    shares = iter(np.split(host, np.cumsum([len(numbers) for numbers in flat])[:-1]))
    return [
        rule.accept(tree, rows, None if numbers is None else next(shares).reshape(numbers.shape))
        for rule, tree, rows, numbers in zip(rules, trees, logits, made, strict=True)
    ]


def argmax_at_once(device: torch.device) -> bool:
    return device.type != "cpu"
