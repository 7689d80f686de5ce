"""Sampled trees: children drawn without replacement from the drafter's distribution q.

The shape is chosen first, from q and from past rounds alone. Then the tokens are drawn, the
children of each parent independently of all others. Recursive rejection and traversal
verification (decoder/acceptance/rules.py) are exact under this condition: the existence of a
child may depend on q and on earlier draws, never on its own token. If q depends on the path,
branches may compete for a budget by scores that contain no node's own token.

A block drafter's q is known for every position beforehand (`draw_from_lattice`). A drafter
that looks at paths runs one forward a level (`draw_levels`); for a chain this is standard
speculative sampling (Leviathan, Kalman and Matias, 2023).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from costmodel.statistics import Array, Ints
from decoder.acceptance.sampling import Sampling
from decoder.device import to_device
from decoder.jit import jit
from decoder.tree.draft_tree import EMPTY, DraftTree, Lattice, rooted
from decoder.tree.growth import ROOT, Frontier


@dataclass(frozen=True, slots=True)
class DrawnTree(DraftTree):
    """A tree whose siblings, in row order, were drawn without replacement from q.

    q        float32 [distributions, vocab], which the children were drawn from; rows need not
             sum to 1, and may lack the last columns of the target's vocabulary
    sources  int64 [N + 1]: the distribution of each row's children, -1 for a leaf
    scores   float64 [N]: expected acceptance of the shape, not of the drawn tokens
    """

    q: torch.Tensor
    sources: Ints

    def child_rows(self) -> list[list[int]]:
        """The rows of each row's children, in draw order."""
        children: list[list[int]] = [[] for _ in range(self.rows)]
        for node, parent in enumerate(self.parents.tolist()):
            children[parent].append(node + 1)
        return children


def proposal(q: torch.Tensor) -> torch.Tensor:
    """q as float32, with values that are no probability (NaN, negative) set to 0."""
    return torch.nan_to_num(q.float(), nan=0.0, posinf=0.0, neginf=0.0).clamp_min_(0.0)


def draw_from_lattice(
    topology: DraftTree, whole: torch.Tensor, generator: torch.Generator
) -> DraftTree:
    """Draw the tokens of a tree whose shape was chosen from a block drafter's q.

    topology   the shape, a tree whose tokens are ignored: siblings, in row order, become the
               first, second, ... draw from the q of their position
    whole      float32 [gamma, vocab], the drafter's softmax at the sampling temperature
    generator  of the draws, on any device
    If q has fewer tokens above 0 than a parent has children, the last children are left out
    with their subtrees; this depends on q alone.
    """
    if topology.nodes == 0:
        return EMPTY
    q = proposal(whole[: int(topology.depths.max())])
    counts = np.bincount(topology.parents, minlength=topology.rows)
    inner = np.flatnonzero(counts)
    positions = topology.row_depths()[inner]
    drawn = without_replacement(q, positions, counts[inner], generator)
    slots = np.zeros(topology.rows, dtype=np.int64)
    slots[inner] = np.arange(len(inner))
    tokens = drawn[slots[topology.parents], sibling_ranks(topology.parents)]
    sources = np.full(topology.rows, -1, dtype=np.int64)
    sources[inner] = positions
    tree = DrawnTree(tokens, topology.parents, topology.depths, topology.scores, q, sources)
    return tree if tokens.min() >= 0 else without_undrawn(tree)


def sibling_ranks(parents: Ints) -> Ints:
    """[N] the draw order of each node: the number of its earlier siblings."""
    order = np.argsort(parents, kind="stable")
    ordered = parents[order]
    ranks = np.empty(len(parents), dtype=np.int64)
    ranks[order] = np.arange(len(parents)) - np.searchsorted(ordered, ordered)
    return ranks


def without_replacement(
    distributions: torch.Tensor, sources: Ints, counts: Ints, generator: torch.Generator
) -> Ints:
    """Draw distinct tokens for many parents at once; int64 [parents, max count], padded by -1.

    distributions  float32 [distributions, vocab], not negative, finite
    sources        [parents] the distribution of each parent's children
    counts         [parents] children wanted; there are fewer if q has fewer tokens above 0

    Independent draws without their repetitions are draws without replacement. So each trip
    inverts the cumulative q (float64) at a few places for every parent, outside the intervals of
    the tokens that it has, and keeps the new tokens. A trip costs one device-to-host copy; there
    are mostly two or three.
    """
    vocab = distributions.shape[1]
    cumulative = distributions.flatten().cumsum(0, dtype=torch.float64)
    ends = np.concatenate((np.zeros(1), cumulative[vocab - 1 :: vocab].cpu().numpy()))
    most, first, last = int(counts.max(initial=0)), ends[sources], ends[sources + 1]
    filled, wanted = np.zeros(len(counts), dtype=np.int64), np.where(last > first, counts, 0)
    tokens = np.full((len(counts), most), -1, dtype=np.int64)
    # Sorted by place, [parents, most, 2]: start and width of each taken interval.
    taken = np.zeros((len(counts), most, 2))
    while len(missing := np.flatnonzero(filled < wanted)):
        tries = 2 * int((counts - filled)[missing].max())
        uniforms = torch.rand(
            (len(missing), tries), generator=generator, device=generator.device, dtype=torch.float64
        )
        free = (first[missing], (last - first)[missing], taken[missing], filled[missing])
        places = _places(uniforms.cpu().numpy(), *free)
        at = to_device(places, cumulative.device).flatten()
        index = torch.searchsorted(cumulative, at, right=True).clamp_max_(len(cumulative) - 1)
        low = torch.where(index > 0, cumulative[(index - 1).clamp_min(0)], 0.0)
        mass = distributions.flatten()[index].double()
        drawn = torch.stack((index.double(), low, cumulative[index], mass)).cpu().numpy()
        drawn = drawn.reshape(4, len(missing), tries)
        _add(drawn, missing, sources[missing] * vocab, vocab, (tokens, taken, filled, wanted))
    return tokens


@jit
def _places(uniforms, first, mass, taken, filled):  # type: ignore[no-untyped-def]
    """Uniforms [parents, tries] spread over the cumulative q that is not taken."""
    places = np.empty_like(uniforms)
    for parent in range(len(uniforms)):
        count = filled[parent]
        free = max(mass[parent] - taken[parent, :count, 1].sum(), 0.0)
        for trial in range(uniforms.shape[1]):
            place = first[parent] + uniforms[parent, trial] * free
            for interval in range(count):
                if place < taken[parent, interval, 0]:
                    break
                place += taken[parent, interval, 1]
            places[parent, trial] = place
    return places


@jit
def _add(drawn, parents, firsts, vocab, state):  # type: ignore[no-untyped-def]
    """Append new tokens, of `drawn` [4, parents, tries]: flat index, interval start and end, q."""
    tokens, taken, filled, wanted = state
    for slot in range(len(parents)):
        parent = parents[slot]
        before = count = filled[parent]
        for trial in range(drawn.shape[2]):
            if count == wanted[parent]:
                break
            token = int(drawn[0, slot, trial]) - firsts[slot]
            # Rounding can place a draw at an edge: outside its row, on a token of probability 0
            # (where a parallel sum may rise a little), or on one that is already drawn.
            outside = token < 0 or token >= vocab or drawn[3, slot, trial] <= 0.0
            if outside or np.any(tokens[parent, :count] == token):
                continue
            tokens[parent, count] = token
            hole = count
            while hole > 0 and taken[parent, hole - 1, 0] > drawn[1, slot, trial]:
                taken[parent, hole] = taken[parent, hole - 1]
                hole -= 1
            taken[parent, hole, 0] = drawn[1, slot, trial]
            taken[parent, hole, 1] = drawn[2, slot, trial] - drawn[1, slot, trial]
            count += 1
        filled[parent] = count
        if count == before:  # the first try is new as long as anything above 0 is left
            wanted[parent] = count


def without_undrawn(tree: DrawnTree) -> DraftTree:
    """The tree without the children that have no token, and without their subtrees."""
    nodes, rows = rooted(tree.parents, tree.tokens >= 0)
    if not len(nodes):
        return EMPTY
    parents, sources = rows[tree.parents[nodes]], tree.sources[np.append(0, nodes + 1)]
    sources[np.setdiff1d(np.arange(len(sources)), parents)] = -1  # its children are all gone
    return DrawnTree(
        tree.tokens[nodes], parents, tree.depths[nodes], tree.scores[nodes], tree.q, sources
    )


# A drafter's q below a frontier's nodes, [F, vocab]; `ROOT`, the bonus token, begins a new tree.
LevelDistributions = Callable[[Frontier], torch.Tensor]


def draw_levels(
    topology: DraftTree,
    source: LevelDistributions,
    generator: torch.Generator,
    depth: int,
    most: Callable[[], Ints] | None = None,
) -> DraftTree:
    """Draw the tokens of at most `depth` levels of a tree whose shape was chosen before.

    topology   as `draw_from_lattice` takes it
    most       the most children of each node that q was last given for, by what q depends on
    Returns a `DrawnTree`, or the empty tree if nothing can be drawn.
    """
    if topology.nodes == 0 or depth < 1:
        return EMPTY
    parents, ranks = topology.parents, sibling_ranks(topology.parents)
    counts = np.bincount(parents, minlength=topology.rows)
    counts[topology.row_depths() >= depth] = 0
    tokens = np.full(topology.nodes, -1, dtype=np.int64)
    sources = np.full(topology.rows, -1, dtype=np.int64)
    distributions: list[torch.Tensor] = []
    frontier, drawn_from = ROOT, 0
    while len(rows := frontier.rows):
        distributions.append(proposal(source(frontier)))
        slots = np.full(topology.rows, -1, dtype=np.int64)  # the index of each row in `rows`
        slots[rows] = np.arange(len(rows))
        sources[rows] = drawn_from + slots[rows]
        drawn_from += len(rows)
        if most is not None:
            counts[rows] = np.minimum(counts[rows], most())
        drawn = without_replacement(distributions[-1], slots[rows], counts[rows], generator)
        below = np.flatnonzero((slots[parents] >= 0) & (ranks < counts[parents]))
        tokens[below] = drawn[slots[parents[below]], ranks[below]]
        nodes = below[(tokens[below] >= 0) & (counts[below + 1] > 0)]
        frontier = Frontier(
            frontier.depth + 1, nodes + 1, tokens[nodes], slots[parents[nodes]], ranks[nodes]
        )
    tree = DrawnTree(
        tokens, parents, topology.depths, topology.scores, torch.cat(distributions), sources
    )
    return tree if tokens.min() >= 0 else without_undrawn(tree)


def least_kept(probabilities: Array, sampling: Sampling) -> Array:
    """The least of falling probabilities [gamma, K] that top-k and top-p keep; 0: unknown."""
    positions, width = probabilities.shape
    cut = np.zeros(positions)
    if 0 < sampling.top_k <= width:
        cut = probabilities[:, sampling.top_k - 1]
    if sampling.top_p < 1.0 and width:
        reached = probabilities.cumsum(1) >= sampling.top_p
        last = np.where(reached.any(1), reached.argmax(1), width - 1)
        enough = reached[np.arange(positions), last]
        cut = np.maximum(cut, np.where(enough, probabilities[np.arange(positions), last], 0.0))
    return cut


class RankExpectation:
    """Expected acceptance of the j-th child drawn below an accepted node.

    It is learnt from past rounds as a hazard: among accepted nodes whose first j - 1 children
    are not on the accepted path, the share whose j-th child is. Counts are kept by the
    drafter's confidence c (the largest probability of q) and by j. They start as `PRIOR`
    observations of (0.6 + 0.35 c^2) / j^(1 - c) (lab/studies/results/acceptance_rules.json).
    """

    EDGES = np.array([0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 0.95])  # of the confidence classes
    RANKS = 16  # later draws share the counts of the last rank
    PRIOR = 8.0
    FADING = 0.995  # a round
    USUAL = 0.7  # confidence before any round
    DEPTHS = 64

    def __init__(self) -> None:
        shape = (len(self.EDGES) + 1, self.RANKS)
        self._trials = np.zeros(shape)
        self._accepted = np.zeros(shape)
        self._confidence = np.full(self.DEPTHS, self.USUAL)
        self._rounds = np.ones(self.DEPTHS)

    def lattice(self, confidences: Array, width: int) -> Lattice:
        """Candidates [depth, width] for a shape by confidences [depth]; token j: the j-th draw."""
        sure = np.clip(np.nan_to_num(confidences), 0.0, 1.0)[:, None]
        draws = np.arange(1, width + 1)
        prior = (0.6 + 0.35 * sure**2) / draws ** (1.0 - sure)
        classes = np.searchsorted(self.EDGES, sure[:, 0])[:, None]
        ranks = np.minimum(draws, self.RANKS) - 1
        trials, accepted = self._trials[classes, ranks], self._accepted[classes, ranks]
        hazards = (accepted + self.PRIOR * prior) / (trials + self.PRIOR)
        before = np.cumprod(1.0 - hazards, axis=1)
        before = np.concatenate((np.ones((len(sure), 1)), before[:, :-1]), axis=1)
        expected: Array = np.minimum.accumulate(hazards * before, axis=1)
        return Lattice(np.broadcast_to(draws - 1, expected.shape), expected)

    def usual_confidences(self, depth: int) -> Array:
        """[depth] the mean confidence of past rounds, for a q that is not known beforehand."""
        counted = min(depth, self.DEPTHS)
        return np.pad(self._confidence[:counted], (0, depth - counted), mode="edge")

    def observe(
        self, tree: DrawnTree, accepted_rows: list[int], confidence_of: Callable[[int], float]
    ) -> None:
        """Learn from a round; `confidence_of` gives the largest probability of q below a row."""
        self._trials *= self.FADING
        self._accepted *= self.FADING
        path = [row for row in (0, *accepted_rows) if tree.sources[row] >= 0]
        every = tree.child_rows()
        for depth, row in enumerate(path):
            confidence, children = confidence_of(row), every[row]
            hit = depth < len(accepted_rows)
            tried = 1 + int(np.searchsorted(children, accepted_rows[depth])) if hit else None
            ranks = np.minimum(np.arange(len(children))[:tried], self.RANKS - 1)
            level = int(np.searchsorted(self.EDGES, confidence))
            np.add.at(self._trials[level], ranks, 1.0)
            if hit:
                self._accepted[level, ranks[-1]] += 1.0
            if depth < self.DEPTHS:
                self._rounds[depth] = self._rounds[depth] * self.FADING + 1.0
                change = confidence - self._confidence[depth]
                self._confidence[depth] += change / self._rounds[depth]
