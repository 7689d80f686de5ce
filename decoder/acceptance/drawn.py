"""Sampled trees: children drawn without replacement from the drafter's distribution q.

The shape is chosen first, from q and from past rounds alone; only then are the tokens
drawn, every parent's children independently of all others. This is what recursive
rejection and traversal verification (decoder.acceptance.rules) need to be exact: whether a child
exists may depend on q and on earlier draws, never on the token it would hold. So where q
depends on the path (a drafter that goes level by level), branches may compete for a budget
by scores that hold no node's own token: under both rules a child is accepted, itself or in
its subtree, with a probability that does not depend on the shape of the subtree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from decoder.device import to_device
from decoder.jit import jit
from decoder.tree import EMPTY, DraftTree


@dataclass(frozen=True, slots=True)
class DrawnTree(DraftTree):
    """A tree whose siblings, in row order, were drawn without replacement from q.

    q        float32 [distributions, vocab], the very numbers the children were drawn with;
             rows need not sum to 1 exactly, what counts are their proportions; may have
             fewer columns than the target's vocabulary, the rest then being 0
    sources  int64 [N + 1]: for each row, which distribution its children were drawn from;
             -1 for a leaf
    scores   float64 [N]: expected acceptance (of the shape), not the drawn tokens' chances
    """

    q: torch.Tensor
    sources: NDArray[np.int64]

    def children(self, row: int) -> NDArray[np.int64]:
        """Rows of the children of `row`, in draw order."""
        return np.flatnonzero(self.parents == row) + 1


def proposal(q: torch.Tensor) -> torch.Tensor:
    """q fit to be drawn from: float32, with whatever is no probability set to 0.

    A drafter may give NaN; a position without any usable mass has no children.
    """
    return torch.nan_to_num(q.float(), nan=0.0, posinf=0.0, neginf=0.0).clamp_min_(0.0)


def draw_from_lattice(
    topology: DraftTree, whole: torch.Tensor, generator: torch.Generator
) -> DraftTree:
    """Draw the tokens of a tree whose shape was chosen from a block drafter's q.

    topology   a tree whose tokens do not count: siblings, in row order, become the first,
               second, ... draw from the q of their position
    whole      float32 [gamma, vocab], the drafter's softmax at the sampling temperature
    generator  of the draws, on any device
    Where q has fewer tokens of non-zero probability than a parent has children, the last
    children are left out, with what hangs below them; that depends on q alone.
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


def sibling_ranks(parents: NDArray[np.int64]) -> NDArray[np.int64]:
    """[N] how many earlier nodes hang below the same parent: the draw order of each node."""
    order = np.argsort(parents, kind="stable")
    ordered = parents[order]
    ranks = np.empty(len(parents), dtype=np.int64)
    ranks[order] = np.arange(len(parents)) - np.searchsorted(ordered, ordered)
    return ranks


def without_replacement(
    distributions: torch.Tensor,
    sources: NDArray[np.int64],
    counts: NDArray[np.int64],
    generator: torch.Generator,
) -> NDArray[np.int64]:
    """Draw distinct tokens for many parents at once; int64 [parents, max count], padded by -1.

    distributions  float32 [distributions, vocab], not negative, finite
    sources        [parents] which distribution each parent's children come from
    counts         [parents] children wanted; fewer come where q has fewer tokens above 0

    Independent draws whose repetitions are dropped are draws without replacement. Each trip
    therefore inverts the cumulative q (float64, so that the draws follow the float32 q to
    rounding) at a few places for every parent, outside the intervals of the tokens it already
    has, and keeps what is new. One device-to-host copy a trip, mostly two or three trips.
    """
    vocab = distributions.shape[1]
    cumulative = distributions.flatten().cumsum(0, dtype=torch.float64)
    ends = np.concatenate((np.zeros(1), cumulative[vocab - 1 :: vocab].cpu().numpy()))
    room = _Room(sources, counts, ends)
    while len(missing := room.missing()):
        tries = 2 * int((counts - room.filled)[missing].max())
        uniforms = torch.rand(
            (len(missing), tries),
            generator=generator,
            device=generator.device,
            dtype=torch.float64,
        )
        places = room.places(missing, uniforms.cpu().numpy())
        at = to_device(places, cumulative.device).flatten()
        index = torch.searchsorted(cumulative, at, right=True).clamp_max_(len(cumulative) - 1)
        low = torch.where(index > 0, cumulative[(index - 1).clamp_min(0)], 0.0)
        mass = distributions.flatten()[index].double()
        found = torch.stack((index.double(), low, cumulative[index], mass)).cpu().numpy()
        room.add(missing, found.reshape(4, len(missing), tries), vocab)
    return room.tokens


class _Room:
    """What each parent has drawn so far, and the intervals of cumulative q that are taken."""

    def __init__(
        self, sources: NDArray[np.int64], counts: NDArray[np.int64], ends: NDArray[np.float64]
    ) -> None:
        most = int(counts.max(initial=0))
        self.filled = np.zeros(len(counts), dtype=np.int64)
        self.tokens = np.full((len(counts), most), -1, dtype=np.int64)
        self._wanted = np.where(ends[sources + 1] > ends[sources], counts, 0)
        self._sources = sources
        self._first = ends[sources]
        self._mass = ends[sources + 1] - ends[sources]
        # Sorted by place, [parents, most, 2]: start and width of each taken interval.
        self._taken = np.zeros((len(counts), most, 2))

    def missing(self) -> NDArray[np.int64]:
        """The parents that still need a token."""
        return np.flatnonzero(self.filled < self._wanted)

    def places(
        self, parents: NDArray[np.int64], uniforms: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Uniforms [parents, tries] spread over the cumulative q that is not taken."""
        first, mass = self._first[parents], self._mass[parents]
        return _places(uniforms, first, mass, self._taken[parents], self.filled[parents])

    def add(self, parents: NDArray[np.int64], found: NDArray[np.float64], vocab: int) -> None:
        """Keep what is new of found [4, parents, tries]: flat index, interval from and to, q."""
        state = (self.tokens, self._taken, self.filled, self._wanted)
        _add(found, parents, self._sources[parents] * vocab, vocab, state)


@jit
def _places(uniforms, first, mass, taken, filled):  # type: ignore[no-untyped-def]
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
def _add(found, parents, firsts, vocab, state):  # type: ignore[no-untyped-def]
    """Append each parent's new tokens and insert their intervals."""
    tokens, taken, filled, wanted = state
    for slot in range(len(parents)):
        parent = parents[slot]
        before = count = filled[parent]
        for trial in range(found.shape[2]):
            if count == wanted[parent]:
                break
            token = int(found[0, slot, trial]) - firsts[slot]
            # Rounding can place a draw at an edge: outside its row, on a token of probability 0
            # (a parallel sum may seem to rise there), or on one already there.
            outside = token < 0 or token >= vocab or found[3, slot, trial] <= 0.0
            if outside or np.any(tokens[parent, :count] == token):
                continue
            tokens[parent, count] = token
            hole = count
            while hole > 0 and taken[parent, hole - 1, 0] > found[1, slot, trial]:
                taken[parent, hole] = taken[parent, hole - 1]
                hole -= 1
            taken[parent, hole, 0] = found[1, slot, trial]
            taken[parent, hole, 1] = found[2, slot, trial] - found[1, slot, trial]
            count += 1
        filled[parent] = count
        if count == before:  # the first try is new, unless nothing above 0 is left
            wanted[parent] = count


def without_undrawn(tree: DrawnTree) -> DraftTree:
    """The tree without the children that q had no token for, and without their subtrees."""
    row_of = np.full(tree.rows, -1, dtype=np.int64)
    row_of[0] = 0
    kept = []
    for node, parent in enumerate(tree.parents):
        if tree.tokens[node] >= 0 and row_of[parent] >= 0:
            kept.append(node)
            row_of[node + 1] = len(kept)
    if not kept:
        return EMPTY
    parents = row_of[tree.parents[kept]]
    sources = np.full(len(kept) + 1, -1, dtype=np.int64)
    old_rows = np.concatenate((np.zeros(1, dtype=np.int64), np.array(kept) + 1))
    has_children = np.unique(parents)
    sources[has_children] = tree.sources[old_rows[has_children]]
    return DrawnTree(
        tree.tokens[kept], parents, tree.depths[kept], tree.scores[kept], tree.q, sources
    )
