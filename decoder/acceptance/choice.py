"""Which acceptance rule a sequence uses each round, and the drawn trees that go with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from costmodel.errors import InputError
from decoder.acceptance.drawn import DrawnTree, draw_from_lattice
from decoder.acceptance.expectation import RankExpectation
from decoder.acceptance.rules import (
    Accepted,
    recursive_rejection,
    traversal,
    walk,
    walk_tokens,
)
from decoder.acceptance.sampling import Picker, RunningEntropy, Sampling
from decoder.device import to_device
from decoder.drafters.base import Drafter
from decoder.tree import DraftTree, Lattice

RuleName = Literal["walk", "recursive", "traversal", "auto"]

# nats; below it deterministic trees accept more, with a poor drafter: the rules cross at 0.59 and
# 0.66 there and at 0.15 with a good one (benchmarks/results/acceptance_rules.json).
ENTROPY_THRESHOLD = 0.6


def parse_rule(name: str, drafter: Drafter) -> RuleName:
    """The rule of this name; InputError for an unknown one, or one the drafter cannot serve.

    `auto` is `walk` for a drafter without sampled trees.
    """
    if name not in get_args(RuleName):
        raise InputError(
            f"'{name}' is not an acceptance rule",
            hint="Use walk, recursive, traversal or auto.",
        )
    if drafter.draws != "never":
        return cast(RuleName, name)
    if name in ("recursive", "traversal"):
        raise InputError(
            f"{name} acceptance needs a drafter with a distribution over the whole vocabulary, "
            f"and the {drafter.name} drafter has none",
            hint="Use --acceptance walk, or auto.",
        )
    return "walk"


class AcceptanceRule:
    """The acceptance of one sequence, round after round.

    `walk` follows the target's own draws down a deterministic tree; `recursive` and
    `traversal` judge trees drawn from q; `auto` walks while the target's recent
    distributions have a mean entropy below `ENTROPY_THRESHOLD`, and otherwise takes
    traversal verification. At T = 0 every rule walks. Everything is decided from past
    rounds; nothing is shared with other sequences, so a seed gives the same text again
    wherever the policy chooses the same shapes again.

    A round asks `wants_drawn` before drafting. If so, the policy chooses the shape from
    `expected(...)` instead of the candidates, and `drawn` gives that shape its tokens.
    """

    def __init__(self, name: RuleName, sampling: Sampling, device: torch.device) -> None:
        if sampling.temperature == 0.0:
            name = "walk"
        self._fixed = name
        self._entropy = RunningEntropy() if name == "auto" else None
        self._sampling = sampling
        self._expectation = RankExpectation()
        self.pick = Picker(sampling, device, self._entropy)

    @property
    def name(self) -> str:
        """The rule of the coming round: walk, recursive or traversal."""
        if self._entropy is None:
            return self._fixed
        entropy = self._entropy.mean()
        return "traversal" if entropy is not None and entropy >= ENTROPY_THRESHOLD else "walk"

    @property
    def greedy(self) -> bool:
        """Whether the target's token is the argmax of its row, whatever came before."""
        return self._sampling.temperature == 0.0

    def wants_drawn(self) -> bool:
        """Whether this round's tree should be drawn from q; asked before drafting."""
        return self.name != "walk"

    def expected(self, candidates: Lattice) -> Lattice:
        """The policy's candidates for the shape of a drawn tree, from the drafter's own.

        Token j stands for the j-th draw, its probability for the expected acceptance.
        """
        if candidates.tokens.size == 0:
            return candidates
        return self._expectation.lattice(candidates.probabilities[:, 0], candidates.tokens.shape[1])

    def expected_by_depth(self, depth: int, width: int) -> Lattice:
        """The same for a drafter whose q is known only as it draws, level by level."""
        return self._expectation.lattice(self._expectation.usual_confidences(depth), width)

    def drawn(self, shape: DraftTree, candidates: Lattice) -> DraftTree:
        """The tree of this shape with tokens drawn from `candidates.whole`.

        Where the target's distribution is cut by top-k or top-p, so is q: draws beyond the
        cut would be refused. (Any q is exact, as long as the ratio uses the same.)
        """
        whole = candidates.whole
        cut = least_kept(candidates.probabilities, self._sampling)
        if cut.any():
            lowest = to_device(cut, whole.device).to(whole.dtype)
            whole = torch.where(whole >= lowest[:, None], whole, 0.0)
        return draw_from_lattice(shape, whole, self.pick.generator)

    def accept(self, tree: DraftTree, logits: torch.Tensor) -> Accepted:
        """What the target accepts of a tree; logits [rows, vocab] of its verification.

        A tree that was not drawn is walked. What happened is noted for later rounds.
        """
        if not isinstance(tree, DrawnTree):
            return walk(tree, logits, self.pick)
        judge = recursive_rejection if self._fixed == "recursive" else traversal
        outcome = judge(tree, logits, self.pick)
        self._expectation.observe(tree, outcome.rows)
        return outcome


def accept_together(
    rules: Sequence[AcceptanceRule], trees: Sequence[DraftTree], logits: Sequence[torch.Tensor]
) -> list[Accepted]:
    """What the target accepts of each tree; logits [rows, vocab] of each verification.

    At T = 0 an accelerator gives the argmax of all rows in one copy to the host, where the
    trees are walked. At T > 0 only visited rows are processed, with one copy for each in a
    walk, since top-p over all of them costs more than the forward.
    """
    if all(rule.greedy for rule in rules) and argmax_at_once(logits[0].device):
        tokens = torch.cat([rows.argmax(-1) for rows in logits]).cpu().numpy()
        ends = np.cumsum([len(rows) for rows in logits])[:-1]
        parts = np.split(tokens, ends)
        return [walk_tokens(tree, part) for tree, part in zip(trees, parts, strict=True)]
    return [rule.accept(tree, rows) for rule, tree, rows in zip(rules, trees, logits, strict=True)]


def argmax_at_once(device: torch.device) -> bool:
    """Not on a CPU: a copy waits for nothing there, and each row is a pass over the vocabulary."""
    return device.type != "cpu"


def least_kept(probabilities: NDArray[np.float64], sampling: Sampling) -> NDArray[np.float64]:
    """[gamma] the least probability that top-k and top-p keep; 0 where that is not known.

    probabilities  [gamma, K] the K largest of each position, descending
    """
    positions, known = probabilities.shape
    cut = np.zeros(positions)
    if 0 < sampling.top_k <= known:
        cut = probabilities[:, sampling.top_k - 1]
    if sampling.top_p < 1.0 and known:
        reached = probabilities.cumsum(1) >= sampling.top_p
        last = np.where(reached.any(1), reached.argmax(1), known - 1)
        enough = reached[np.arange(positions), last]
        cut = np.maximum(cut, np.where(enough, probabilities[np.arange(positions), last], 0.0))
    return cut
