"""Recorded rounds of decoding, evaluated for every tree size in hindsight.

Best-first trees are nested. So the tree of a round's candidates and the tokens that the target
then wrote give the tokens that every tree size would have committed; a cost model gives the
seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.errors import InputError
from decoder.tree.draft_tree import DraftTree
from lab.bench.analysis.ratios import bootstrap_interval, rate_ratios

Array = NDArray[np.float64]


def accepted_rows(tree: DraftTree, truth: Sequence[int]) -> list[int]:
    """The rows that a target accepts whose next tokens are `truth`, in order."""
    rows: list[int] = []
    row = 0
    for token in truth:
        row = tree.child(row, int(token))
        if row < 0:
            break
        rows.append(row)
    return rows


def committed_by_size(tree: DraftTree, truth: Sequence[int], max_nodes: int) -> NDArray[np.int64]:
    """Tokens that the first N = 0 .. `max_nodes` nodes of a tree commit, the bonus token included.

    tree  in best-first order, so that its first N nodes are the best tree of N nodes
    Row r is in every tree of r nodes or more, so an accepted row r adds one token to all sizes
    N >= r.
    """
    rows = np.asarray(accepted_rows(tree, truth), dtype=np.int64)
    return 1 + np.searchsorted(rows, np.arange(max_nodes + 1), side="right")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedHindsight:
    """Tokens and seconds of R rounds at S tree sizes.

    sizes      int [S]  nodes
    committed  [R, S]   tokens that each size commits in each round
    seconds    [R, S]   of the whole cycle
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
        """[S] tokens per second if every round had verified a tree of that size."""
        rates: Array = self.committed.sum(axis=0) / self.seconds.sum(axis=0)
        return rates

    def best_fixed(self) -> tuple[int, float]:
        """The size with the highest overall rate, and that rate in tokens per second."""
        rates = self.fixed_rates()
        best = int(np.argmax(rates))
        return int(self.sizes[best]), float(rates[best])

    def oracle(self) -> tuple[NDArray[np.int64], float]:
        """The sizes [R] that maximise total tokens / total seconds, and that rate.

        Dinkelbach's iteration (1967): at the optimal rate, each round takes the size with the
        highest tokens - rate x seconds. It is an upper bound for every policy, since it knows
        the outcome of each round.
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


def pooled_ratio(arm: ArrayLike, base: ArrayLike) -> dict[str, Any]:
    """Ratio of two arms' pooled rates, with the bootstrap interval of `rooftree bench`.

    arm, base: [texts, 2] tokens and seconds of the same texts in the same order. The interval
    is None for a single text. Raises InputError for arms of different texts.
    """
    first, second = np.asarray(arm, dtype=np.float64), np.asarray(base, dtype=np.float64)
    if first.shape != second.shape or first.ndim != 2 or first.shape[1] != 2 or not len(first):
        raise InputError("paired arms need tokens and seconds of the same texts")
    table = np.hstack([first, second])
    return {
        "ratio": float(rate_ratios(table.sum(axis=0))),
        "interval_95": list(bootstrap_interval(table)) if len(table) > 1 else None,
    }
