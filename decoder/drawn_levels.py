"""Sampled trees of a drafter that looks at paths: drawn level by level.

The shape is chosen before any draw. What a node's children are drawn from depends on the
tokens drawn above it, so there is one forward of the drafter a level; the plain chain of
this is standard speculative sampling (Leviathan, Kalman and Matias, 2023).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from decoder.drawn import DrawnTree, proposal, sibling_ranks, without_replacement, without_undrawn
from decoder.growth import Frontier
from decoder.tree import EMPTY, DraftTree


class LevelDistributions(Protocol):
    """The drafter's q at nodes, asked for level by level: first `root`, then `expand`."""

    def root(self) -> torch.Tensor:
        """q below the bonus token, [1, vocab]; starts a new tree."""

    def expand(self, frontier: Frontier) -> torch.Tensor:
        """q below the frontier's nodes, [F, vocab]."""


def draw_levels(
    topology: DraftTree, source: LevelDistributions, generator: torch.Generator, depth: int
) -> DraftTree:
    """Draw the tokens of a tree whose shape was chosen before, at most `depth` levels of it.

    topology   a tree whose tokens do not count: siblings, in row order, become the first,
               second, ... draw without replacement from the q of their parent
    generator  of the draws, on any device
    Where q has fewer tokens of non-zero probability than a parent has children, the last
    children are left out, with what hangs below them; that depends on q alone. Returns a
    `DrawnTree`, or the empty tree where nothing can be drawn.
    """
    if topology.nodes == 0 or depth < 1:
        return EMPTY
    parents, ranks = topology.parents, sibling_ranks(topology.parents)
    counts = np.bincount(parents, minlength=topology.rows)
    counts[topology.row_depths() >= depth] = 0
    tokens = np.full(topology.nodes, -1, dtype=np.int64)
    sources = np.full(topology.rows, -1, dtype=np.int64)
    distributions: list[torch.Tensor] = []
    rows, level, drawn_from = np.zeros(1, np.int64), 0, 0
    q = source.root()
    while True:
        distributions.append(proposal(q))
        slots = _slots(rows, topology.rows)
        sources[rows] = drawn_from + slots[rows]
        drawn_from += len(rows)
        drawn = without_replacement(distributions[-1], slots[rows], counts[rows], generator)
        below = np.flatnonzero(slots[parents] >= 0)
        tokens[below] = drawn[slots[parents[below]], ranks[below]]
        level += 1
        rows = below[(tokens[below] >= 0) & (counts[below + 1] > 0)] + 1
        if len(rows) == 0:
            break
        nodes = rows - 1
        q = source.expand(Frontier(level, rows, tokens[nodes], slots[parents[nodes]], ranks[nodes]))
    tree = DrawnTree(
        tokens, parents, topology.depths, topology.scores, torch.cat(distributions), sources
    )
    return tree if tokens.min() >= 0 else without_undrawn(tree)


def _slots(rows: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """[count] the place of each row in `rows`, -1 where it is not there."""
    slots = np.full(count, -1, dtype=np.int64)
    slots[rows] = np.arange(len(rows))
    return slots
