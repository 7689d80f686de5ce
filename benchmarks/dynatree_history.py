"""Where DynaTree's history adaptation settles, simulated: by levels, by nodes, and without it.

    python -m benchmarks.dynatree_history [--rounds 4000]

The drafter is made up and calibrated: below every node the most probable child has a
probability drawn from a Beta distribution, and the target takes each child just as often
as it says. Nothing is timed, so the result does not depend on the machine.
"""

from __future__ import annotations

import argparse

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import store
from decoder.growth import Children, Frontier, grow
from decoder.policies.dynatree import DynaTree, HistorySettings
from decoder.tree import CandidateTree, DraftTree, best_first

TOP_CHILD = {"unsure": (1.0, 1.0), "middling": (2.0, 1.0), "sure": (4.0, 1.0), "torn": (0.5, 0.3)}
REST = np.array([0.5, 0.2, 0.1])  # of what the most probable child leaves
SHARES = {"none": 0.5, "levels": 0.5, "nodes": 0.2}  # and the target share of each
SETTLING = 0.25  # of the rounds are left out


class BetaSource:
    """Children of nodes whose confidence is Beta distributed."""

    def __init__(self, random: np.random.Generator, shape: tuple[float, float]) -> None:
        self._random, self._shape = random, shape

    def root(self, width: int) -> Children:
        return self._children(1, width)

    def expand(self, frontier: Frontier, width: int) -> Children:
        return self._children(len(frontier.rows), width)

    def _children(self, count: int, width: int) -> Children:
        first = self._random.beta(*self._shape, size=(count, 1))
        probabilities = np.hstack((first, np.minimum((1.0 - first) * REST, first)))[:, :width]
        return np.tile(np.arange(probabilities.shape[1]), (count, 1)), probabilities


def accepted_depth(tree: CandidateTree, random: np.random.Generator) -> int:
    """Levels that a target goes down which takes each child with its probability."""
    row = depth = 0
    while True:
        below = np.flatnonzero(tree.parents == row)
        place = np.searchsorted(np.cumsum(tree.probabilities[below]), random.random())
        if place == len(below):
            return depth
        row, depth = int(below[place]) + 1, depth + 1


def as_many_levels(nodes: int) -> DraftTree:
    """A chain, for which the share of levels is the share of nodes."""
    rows = np.arange(nodes, dtype=np.int64)
    return DraftTree(rows, rows, rows + 1, np.ones(nodes))


def simulate(drafter: str, share: str, rounds: int) -> dict[str, float]:
    random = np.random.default_rng(0)
    source = BetaSource(random, TOP_CHILD[drafter])
    policy = DynaTree(256, HistorySettings(target_share=SHARES[share]))
    seen: list[NDArray[np.float64]] = []
    for _ in range(rounds):
        tree = grow(source, policy.growth, policy.growth.max_depth)
        nodes, accepted = len(tree.tokens), accepted_depth(tree, random)
        seen.append(np.array([nodes, accepted, policy.growth.base_depth, policy.growth.sure]))
        if share == "none":
            continue
        observed = best_first(tree, nodes) if share == "levels" else as_many_levels(nodes)
        policy.observe(observed, list(range(1, accepted + 1)), 0)
    means = np.mean(seen[int(rounds * SETTLING) :], axis=0).round(3).tolist()
    return dict(zip(("nodes", "accepted", "base_depth", "sure"), means, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4000)
    rounds = parser.parse_args().rounds
    result: dict[str, object] = {"simulated": True, "rounds": rounds}
    for drafter in TOP_CHILD:
        for share in SHARES:
            means = simulate(drafter, share, rounds)
            result[f"{drafter}, adapted by {share}"] = means
            print(f"{drafter:9} {share:7}", means)
    store("dynatree_history", result)


if __name__ == "__main__":
    main()
