"""What other tree sizes would have brought in recorded rounds of decoding.

The best-first tree of a round's candidates and the tokens that the target went on to write
say how many tokens every tree size would have committed there, since the trees are nested; a
cost model says how long each would have taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.errors import InputError
from decoder.tree import DraftTree

Array = NDArray[np.float64]


def accepted_rows(tree: DraftTree, truth: Sequence[int]) -> list[int]:
    """The rows that a target which goes on with `truth` accepts, in order."""
    rows: list[int] = []
    row = 0
    for token in truth:
        row = tree.child(row, int(token))
        if row < 0:
            break
        rows.append(row)
    return rows


def committed_by_size(tree: DraftTree, truth: Sequence[int], max_nodes: int) -> NDArray[np.int64]:
    """Tokens that the first N = 0 .. `max_nodes` nodes of a tree commit, the bonus included.

    tree  in best-first order, so that its first N nodes are the best tree of N
    Row r is in every tree of r nodes or more, so each accepted row adds one token from its
    own number on.
    """
    rows = np.asarray(accepted_rows(tree, truth), dtype=np.int64)
    return 1 + np.searchsorted(rows, np.arange(max_nodes + 1), side="right")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hindsight:
    """What is known afterwards about R rounds and S tree sizes.

    sizes      int [S]        nodes
    committed  [R, S]         tokens that each size commits in each round
    seconds    [R, S]         of the whole cycle
    """

    sizes: NDArray[np.int64]
    committed: Array
    seconds: Array

    def __post_init__(self) -> None:
        if not self.committed.shape == self.seconds.shape == (len(self.committed), len(self.sizes)):
            raise InputError("hindsight needs tokens and seconds of every round and size")
        if self.committed.size == 0 or not np.all(self.seconds > 0):
            raise InputError("hindsight needs rounds and sizes, with times above 0")

    def fixed_rates(self) -> Array:
        """[S] tokens a second, had every round verified a tree of that size."""
        rates: Array = self.committed.sum(axis=0) / self.seconds.sum(axis=0)
        return rates

    def best_fixed(self) -> tuple[int, float]:
        """The size that was fastest on the whole, and its tokens a second."""
        rates = self.fixed_rates()
        best = int(np.argmax(rates))
        return int(self.sizes[best]), float(rates[best])

    def oracle(self) -> tuple[NDArray[np.int64], float]:
        """The sizes [R] of highest total tokens / total seconds, and that rate.

        A ratio of sums is largest where each round takes the size of highest tokens -
        rate x seconds at the largest rate itself (Dinkelbach, 1967), which is found by
        turns. Knows what each round brought, so nothing can be faster.
        """
        rounds = np.arange(len(self.committed))
        _, rate = self.best_fixed()
        while True:
            chosen = np.argmax(self.committed - rate * self.seconds, axis=1)
            tokens = float(self.committed[rounds, chosen].sum())
            better = tokens / float(self.seconds[rounds, chosen].sum())
            if better <= rate * (1.0 + 1e-12):
                return self.sizes[chosen], max(better, rate)
            rate = better


def paired_ratio(
    ours: ArrayLike, theirs: ArrayLike, draws: int = 4000, seed: int = 0
) -> dict[str, float | list[float]]:
    """Ratio of two arms' pooled rates with a bootstrap interval over their common texts.

    ours, theirs: [texts, 2] tokens and seconds of the same texts in the same order. Raises
    InputError for arms of different texts.
    """
    first, second = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    if first.shape != second.shape or first.ndim != 2 or first.shape[1] != 2 or not len(first):
        raise InputError("paired arms need tokens and seconds of the same texts")
    picked = np.random.default_rng(seed).integers(0, len(first), (draws, len(first)))
    ratios = _rate(first[picked].sum(axis=1)) / _rate(second[picked].sum(axis=1))
    low, high = np.quantile(ratios, [0.025, 0.975])
    return {
        "ratio": float(_rate(first.sum(axis=0)) / _rate(second.sum(axis=0))),
        "interval_95": [float(low), float(high)],
    }


def _rate(sums: Array) -> Array:
    return np.asarray(sums[..., 0] / sums[..., 1])
