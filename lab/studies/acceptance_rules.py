"""Acceptance rules by entropy: sampled against deterministic draft trees, simulated.

    python -m lab.studies.acceptance_rules [--trials 300]

No model runs. Each position of a block has base log-probabilities -1.3 log(rank) over 4,000
tokens. After each path the target has p = softmax(beta (base + sigma noise)) with independent
noise. The drafter has q, the mean of 48 such targets, which is the marginal of a perfectly
calibrated block drafter. beta sets the entropy, sigma the distance between p and q. Trees of
one size are compared: for the walk best-first on q, for the sampled rules best-first on the
expected acceptance that decoder.acceptance.rules learns during the run. Stores the mean number
of accepted drafted tokens, and the entropy at which the rules cross.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch

from decoder.acceptance.drawn import DrawnTree, RankExpectation, draw_from_lattice
from decoder.acceptance.rules import SeededChoices, recursive_rejection, traversal
from decoder.acceptance.sampling import Sampling
from decoder.tree.draft_tree import DraftTree, Lattice, best_first
from lab.studies.common import environment, store

VOCAB = 4000
MEMBERS = 48  # targets whose mean is q
POSITIONS = 32  # different q's, of which each trial takes some
BETAS = (0.9, 1.1, 1.4, 1.8, 2.3, 3.0, 4.0, 6.0)
SIGMAS = (0.3, 1.0)
SHAPES = ((16, 4), (64, 6))  # nodes, depth
DRAWS = 2  # of the tree, for each set of targets
RULES = {"recursive": recursive_rejection, "traversal": traversal}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    beta: float
    sigma: float
    nodes: int
    depth: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=300)
    options = parser.parse_args()
    cases: list[dict[str, Any]] = []
    crossings: list[dict[str, Any]] = []
    for (nodes, depth), sigma in product(SHAPES, SIGMAS):
        own = []
        for beta in BETAS:
            setting = Setting(beta=beta, sigma=sigma, nodes=nodes, depth=depth)
            own.append(measure(setting, options.trials))
            print(own[-1])
        cases += own
        nats = {f"{rule}_nats": crossing(own, rule) for rule in RULES}
        crossings.append({"nodes": nodes, "depth": depth, "sigma": sigma} | nats)
        print(crossings[-1])
    result = {
        "what": __doc__.splitlines()[0], "environment": environment(), "vocab": VOCAB,
        "trials": options.trials, "accepted": "simulated", "cases": cases, "crossings": crossings,
    }  # fmt: skip
    store("acceptance_rules", result)


def measure(setting: Setting, trials: int) -> dict[str, Any]:
    """Mean accepted tokens of every rule; the first quarter of the trials is for learning only."""
    generator = torch.Generator().manual_seed(1)
    marginals = torch.stack(
        [targets(setting, MEMBERS, generator).softmax(-1).mean(0) for _ in range(POSITIONS)]
    )
    picker = SeededChoices(Sampling(temperature=1.0, seed=2), torch.device("cpu"))
    learnt = {rule: RankExpectation() for rule in RULES}
    entropies: list[float] = []
    accepted: dict[str, list[float]] = {rule: [] for rule in ("walk", *RULES)}
    for trial in range(trials):
        chosen = torch.randperm(POSITIONS, generator=generator)[: setting.depth]
        whole = marginals[chosen]
        top = whole.topk(setting.nodes)
        lattice = Lattice(top.indices.numpy(), top.values.double().numpy())
        logits = targets(setting, setting.nodes + 1, generator)
        p = logits.softmax(-1)
        counted = trial >= trials // 4
        if counted:
            entropies.append(float(torch.special.entr(p[0]).sum()))
            accepted["walk"].append(expected_walk(best_first(lattice, setting.nodes), p))
        for rule, judge in RULES.items():
            counts = []
            for _ in range(DRAWS):
                expected = learnt[rule].lattice(lattice.probabilities[:, 0], setting.nodes)
                shape = best_first(expected, setting.nodes)
                tree = draw_from_lattice(shape, whole, picker.generator)
                assert isinstance(tree, DrawnTree)
                outcome = judge(tree, logits, picker)
                learnt[rule].observe(tree, outcome.rows)
                counts.append(len(outcome.rows))
            if counted:
                accepted[rule].append(float(np.mean(counts)))
    gain = np.array(accepted["traversal"]) - np.array(accepted["walk"])
    return {
        "nodes": setting.nodes,
        "sigma": setting.sigma,
        "beta": setting.beta,
        "entropy_nats": round(float(np.mean(entropies)), 3),
        **{f"{rule}_accepted": round(float(np.mean(n)), 3) for rule, n in accepted.items()},
        "standard_error": round(float(gain.std() / np.sqrt(len(gain))), 3),
    }


def targets(setting: Setting, count: int, generator: torch.Generator) -> torch.Tensor:
    """Logits [count, vocab] of `count` targets."""
    base = -1.3 * torch.log(torch.arange(1, VOCAB + 1, dtype=torch.float32))
    noise = torch.randn(count, VOCAB, generator=generator)
    return setting.beta * (base + setting.sigma * noise)


def expected_walk(tree: DraftTree, p: torch.Tensor) -> float:
    """Expected accepted tokens of the walk: the sum of p(path) over the nodes."""
    reached = np.ones(tree.rows)
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        reached[node + 1] = reached[parent] * float(p[parent, token])
    return float(reached[1:].sum())


def crossing(cases: list[dict[str, Any]], rule: str) -> float | None:
    """The entropy above which the rule accepts more than the walk, by interpolation.

    None where one of the two accepts more throughout.
    """
    ordered = sorted(cases, key=lambda case: float(case["entropy_nats"]))
    entropies = [float(case["entropy_nats"]) for case in ordered]
    gains = [case[f"{rule}_accepted"] - case["walk_accepted"] for case in ordered]
    for index in range(len(gains) - 1, 0, -1):
        low, high = gains[index - 1], gains[index]
        if low < 0.0 <= high:
            share = -low / (high - low)
            return round(
                entropies[index - 1] + share * (entropies[index] - entropies[index - 1]), 3
            )
    return None


if __name__ == "__main__":
    main()
