"""Simulation of DynaTree's history adaptation, and of its trees without it.

    python -m lab.studies.dynatree_history [--texts 120]

The simulated drafter is calibrated: below every node the most probable child has a probability
drawn from a Beta distribution, and the target takes each child with its probability. Nothing is
timed, so the result does not depend on the machine.
"""

from __future__ import annotations

import argparse

import numpy as np
from numpy.typing import NDArray

from decoder.acceptance.rules import Accepted
from decoder.statistics import Round
from decoder.tree.draft_tree import CandidateTree, best_first
from decoder.tree.growth import Children, Frontier, grow
from lab.papers.dynatree.policy import DynaTree
from lab.studies.common import store

TOP_CHILD = {"unsure": (1.0, 1.0), "middling": (2.0, 1.0), "sure": (4.0, 1.0), "torn": (0.5, 0.3)}
REST = np.array([0.5, 0.2, 0.1])  # shares of the rest for the other children
TEXT_ROUNDS = 32
SETTLING = 0.25  # share of the rounds, from the first, that is left out


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
    """The accepted depth with a target that takes each child with its probability."""
    row = depth = 0
    while True:
        below = np.flatnonzero(tree.parents == row)
        place = np.searchsorted(np.cumsum(tree.probabilities[below]), random.random())
        if place == len(below):
            return depth
        row, depth = int(below[place]) + 1, depth + 1


def simulate(drafter: str, texts: int, *, adapted: bool) -> dict[str, float]:
    random = np.random.default_rng(0)
    source = BetaSource(random, TOP_CHILD[drafter])
    policy = DynaTree(256)
    seen: list[NDArray[np.float64]] = []
    for text in range(texts):
        for _ in range(TEXT_ROUNDS):
            growth = policy.growth
            tree = grow(source, growth, growth.max_depth)
            nodes, accepted = len(tree.tokens), accepted_depth(tree, random)
            seen.append(
                np.array([nodes, accepted, growth.base_depth, growth.sure, growth.deep_score])
            )
            path = list(range(1, accepted + 1))
            outcome = Accepted(path, path, 0)
            policy.observe(
                Round(tree=best_first(tree, nodes), accepted=outcome, context=0, text=text)
            )
        if adapted:
            policy.ended(text)
    means = np.mean(seen[int(len(seen) * SETTLING) :], axis=0).round(3).tolist()
    names = ("nodes", "accepted", "base_depth", "sure", "deep_score")
    return dict(zip(names, means, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=120)
    texts = parser.parse_args().texts
    result: dict[str, object] = {"simulated": True, "texts": texts, "rounds_a_text": TEXT_ROUNDS}
    for drafter in TOP_CHILD:
        for how in ("not adapted", "adapted"):
            means = simulate(drafter, texts, adapted=how == "adapted")
            result[f"{drafter}, {how}"] = means
            print(f"{drafter:9} {how:12}", means)
    store("dynatree_history", result)


if __name__ == "__main__":
    main()
