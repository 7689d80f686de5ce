"""Candidates of a block drafter whose scores depend on the tokens drafted before.

Two kinds: on the last token alone, so that all pairs of adjacent candidates are scored at once;
or on the whole path, so that a tree grows level by level. Both run on the device without a look
at the values, can be captured, and give one tensor, which is copied to the host once.

Scores become probabilities that preserve mass: the candidates of a position share what the
block's own softmax gives them together, so that paths of different lengths can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from costmodel.errors import InputError
from costmodel.statistics import Array, Bools, Ints
from decoder.acceptance.drawn import LevelDistributions
from decoder.device import to_device
from decoder.drafters.vocabulary import DraftHead, softmax
from decoder.tree.draft_tree import (
    EMPTY,
    Candidates,
    CandidateTree,
    DraftTree,
    best_first,
    checked_arrays,
    tree_by_position,
)
from decoder.tree.growth import Frontier

# DARTree's settings (magneto0124/DARTree): nodes of a level, and those of them that are expanded.
LEVEL_NODES, FRONTIER = 64, 12

NO_EDGE = -1.0  # the probability of a candidate that may not follow

# From a slot's number, states [F, S] and tokens int64 [F] of paths that end before the slot, to
# the states behind these tokens [F, S] and what is added to the candidates' scores [F, K].
Step = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def check_tables(head: DraftHead, rows: int) -> None:
    """Raise InputError unless tables with a row for each token of a head belong to this one."""
    if head.size != rows:
        raise InputError(
            f"the drafter scores {rows} tokens, and the target's head has {head.size}",
            hint="This target's head cannot be cut to some tokens: use a drafter of all of them.",
        )


@dataclass(frozen=True, slots=True)
class Slots:
    """The K most probable tokens of each predicted position, before the correction.

    places  int64 [rows, K]   columns of the head
    tokens  int64 [rows, K]   the target's ids
    scores  float32 [rows, K] logits
    mass    float32 [rows, 1] logarithm of what the softmax gives them together
    temperature               a tensor of one value
    """

    places: torch.Tensor
    tokens: torch.Tensor
    scores: torch.Tensor
    mass: torch.Tensor
    temperature: torch.Tensor

    @classmethod
    def of(
        cls, logits: torch.Tensor, count: int, temperature: torch.Tensor, head: DraftHead
    ) -> Slots:
        """The best `count` of logits [rows, size]."""
        logits = logits.float()
        best = logits.topk(min(count, logits.shape[-1]))
        whole = (logits / temperature).logsumexp(-1, keepdim=True)
        mass = (best.values / temperature).logsumexp(-1, keepdim=True) - whole
        tokens = best.indices if head.device_ids is None else head.device_ids[best.indices]
        return cls(best.indices, tokens, best.values, mass, temperature)

    def chances(self, row: int | slice, scores: torch.Tensor) -> torch.Tensor:
        """Logarithms of the probabilities of a slot's candidates, of their scores [..., K]."""
        mass = self.mass[row] if isinstance(row, int) else self.mass[row, None]
        return (scores / self.temperature).log_softmax(-1) + mass


@dataclass(frozen=True, slots=True)
class PairLattice(Candidates):
    """K candidates for each position, and the probability of each behind each one before it.

    tokens  int64 [gamma, K]            in any order
    first   float64 [K]                 of the candidates of position 1
    edges   float64 [gamma - 1, K, K]   edges[d, a, b]: of candidate b of position d + 2 behind
                                        candidate a of position d + 1

    The probabilities behind one candidate may sum to less than 1; a negative one marks a
    candidate that may not follow.
    """

    tokens: Ints
    first: Array
    edges: Array

    def sound(self, vocab: int | None = None) -> PairLattice:
        """The same without candidates outside the vocabulary, and with edges from 0 to 1."""
        tokens, _ = checked_arrays(self.tokens, self.tokens, 2)
        gamma, width = tokens.shape
        first, edges = (np.asarray(part, dtype=np.float64) for part in (self.first, self.edges))
        if first.shape != (width,) or edges.shape != (max(gamma - 1, 0), width, width):
            raise ValueError(f"tokens {tokens.shape}, first {first.shape}, edges {edges.shape}")
        unsound: Bools = tokens < 0
        if vocab is not None:
            unsound = unsound | (tokens >= vocab)
        first = _sound(first, np.any(unsound[:1], axis=0))
        return PairLattice(np.where(unsound, 0, tokens), first, _sound(edges, unsound[1:, None]))

    def best_first(self, nodes: int, depth_factors: Array | None = None) -> DraftTree:
        if self.tokens.size == 0:
            return EMPTY
        chances = np.concatenate((self.first[None], self.edges.reshape(-1, len(self.first))))
        return tree_by_position(self.tokens, chances, depth_factors, nodes, paired=True)

    def greedy(self, depth: int) -> tuple[Ints, Array]:
        gamma, width = self.tokens.shape
        picked: list[int] = []
        given: list[float] = []
        chances = self.first
        while len(picked) < min(depth, gamma) and width and chances.max() >= 0.0:
            picked.append(int(chances.argmax()))
            given.append(float(chances[picked[-1]]))
            if len(picked) < gamma:
                chances = self.edges[len(picked) - 1, picked[-1]]
        return self.tokens[range(len(picked)), picked], np.array(given).cumprod()


def _sound(chances: Array, unsound: Bools) -> Array:
    valid = (chances >= 0.0) | (chances == NO_EDGE)  # NaN compares false
    if not unsound.any() and valid.all() and chances.max(initial=0.0) <= 1.0:
        return chances
    return np.where((chances >= 0.0) & ~unsound, np.minimum(chances, 1.0), NO_EDGE)


def score_pairs(slots: Slots, first: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    """The packed pairs of slots, float64 [rows, K, 1 + K]; see `pair_lattice`.

    first  [K]               added to the scores of the first slot
    edges  [rows - 1, K, K]  added to the score of a candidate (last axis) behind the one before
    """
    added = torch.cat((first.expand(1, len(first), -1), edges))
    q = slots.chances(slice(None), slots.scores[:, None] + added).exp().nan_to_num(0.0)
    return torch.cat((slots.tokens[..., None].double(), q.double()), dim=-1)


def compile_pairs() -> None:
    """Compile what makes trees of pairs, so that no round waits."""
    best_first(PairLattice(np.zeros((1, 1), np.int64), np.ones(1), np.zeros((0, 1, 1))), 1)


def pair_lattice(packed: torch.Tensor, depth: int) -> PairLattice:
    """The pairs of the first `depth` positions."""
    pairs = packed[:depth].cpu().numpy()
    return PairLattice(pairs[..., 0].astype(np.int64), pairs[0, 0, 1:], pairs[1:, :, 1:])


def grow_levels(
    slots: Slots, step: Step, state: torch.Tensor, bonus: torch.Tensor, frontier: int
) -> torch.Tensor:
    """A tree of K nodes a slot, packed as float64 [3, rows, K]; see `level_tree`.

    As in DARTree, the `frontier` best paths of a level are expanded
    together, by the sum of their logarithms; but the greedy path is always one of them, and all
    K best children become nodes, which the node budget chooses from.

    state  [1, S]    of the empty path
    bonus  int64 [1]
    """
    states, tokens, paths = state, bonus, torch.zeros_like(slots.mass[0])
    levels: tuple[list[torch.Tensor], ...] = ([], [], [])
    rows, width = slots.tokens.shape
    for row in range(rows):
        states, added = step(row, states, tokens)
        q = slots.chances(row, slots.scores[row] + added)  # [F, K]
        joint = (paths[:, None] + q).flatten()
        greedy = q[0].argmax(keepdim=True)  # row 0 is the greedy path
        nodes = joint.index_fill(0, greedy, torch.inf).topk(width).indices
        chosen, parents = slots.tokens[row, nodes % width], nodes // width
        for level, part in zip(levels, (chosen, parents, q.flatten()[nodes]), strict=True):
            level.append(part)
        if row + 1 < rows:
            paths, tokens = joint[nodes[:frontier]], chosen[:frontier]
            states = states[parents[:frontier]]
    chosen, parents, chances = (torch.stack(level) for level in levels)
    return torch.stack((chosen.double(), parents.double(), chances.exp().nan_to_num(0.0).double()))


def level_tree(packed: torch.Tensor, depth: int) -> CandidateTree:
    """The tree of the first `depth` levels; nodes lie by level, in the order of their choice."""
    levels: NDArray[np.float64] = packed[:, :depth].cpu().numpy()
    width = levels.shape[2]
    parents = levels[1].astype(np.int64)
    parents[1:] += 1 + width * np.arange(len(parents) - 1)[:, None]
    return CandidateTree(levels[0].astype(np.int64).ravel(), parents.ravel(), levels[2].ravel())


def path_distributions(
    head: DraftHead,
    logits: torch.Tensor,
    step: Step,
    start: tuple[torch.Tensor, torch.Tensor],
    temperature: float,
) -> LevelDistributions:
    """The drafter's q over its whole head behind each node of a tree that is drawn.

    step   adds to all logits of a row
    start  the empty path's state [1, S], the bonus [1]
    """
    states = start[0]

    def q(frontier: Frontier) -> torch.Tensor:
        nonlocal states
        before, tokens = start
        if frontier.depth:
            above, tokens = (to_device(p, logits.device) for p in (frontier.above, frontier.tokens))
            before = states[above]
        states, added = step(frontier.depth, before, tokens)
        return head.whole(softmax(logits[frontier.depth].float() + added, temperature))

    return q
