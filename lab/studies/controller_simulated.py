"""The adaptive policy on every published acceptance curve, simulated without a model.

    python -m lab.studies.controller_simulated [--rounds 1500] [--place h100-sxm]

Costs come from the shipped composed profiles of Qwen3-8B, and from a measured profile of this
machine where there is one. All policies see the same drawn blocks and pay the profile's costs.
`bastion:paper`, the rule of the paper's public code, predicts with the profile's two-branch
calibration as that code does, and `bastion:printed`, the rule of its text, with the linear one.
`ratio` is `bastion` with the objective of the paper, the highest A(N) / C(N) of each round: the
effect of that alone. A `padded` place pays for the rows of CUDA graphs. Intervals are
paired bootstraps over runs of 25 rounds. A place whose profile is not at hand keeps its figures.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from costmodel.acceptance import AcceptanceProcess, process_of, published_rows
from costmodel.io import shipped_directory
from costmodel.online import CycleCost, FadingMean
from costmodel.profile.profile import Profile
from costmodel.profile.schema import DrafterSection
from costmodel.profile.store import user_directory
from costmodel.statistics import Array, Ints
from decoder.acceptance.rules import Accepted
from decoder.drafters.base import DraftRequest
from decoder.model.demo_model import DEMO_NAME
from decoder.model.runtime.capture import BUCKETS
from decoder.policies.base import Chain, Cost, Limits, Plain, Policy
from decoder.policies.bastion import SPEED_FADING, Bastion
from decoder.statistics import Round
from decoder.tree.draft_tree import EMPTY, DraftTree, Lattice, best_first
from decoder.tree.growth import TopPaths
from lab.bench.simulated import SimulatedDrafter, Truth
from lab.papers.bastion.policy import PaperBastion, PrintedBastion, released_calibration
from lab.studies.common import RESULTS, pooled_ratio, store

WIDTH = 256  # candidates a position; lower ranks hardly ever end in a tree
VOCAB = 151_936  # Qwen3's; only its order of size matters


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


def committed_by_size(tree: DraftTree, truth: Sequence[int], max_nodes: int) -> Ints:
    """Tokens that the first N = 0 .. `max_nodes` nodes of a tree commit, the bonus token included.

    tree  in best-first order, so that its first N nodes are the best tree of N nodes
    Row r is in every tree of r nodes or more, so an accepted row r adds one token to all sizes
    N >= r.
    """
    rows = np.asarray(accepted_rows(tree, truth), dtype=np.int64)
    return 1 + np.searchsorted(rows, np.arange(max_nodes + 1), side="right")


@dataclass(frozen=True, slots=True)
class CostAt:
    """A cost model evaluated once at one context, for trees of 0 .. `most` nodes.

    cycles_s  of a round by the nodes of its tree; `draft` and `plain` in seconds too
    """

    cycles_s: Array
    draft: float
    plain: float
    context: int = 1024

    @classmethod
    def of(cls, cost: Cost, context: int, most: int) -> CostAt:
        cycles_s = cost.cycle_s(np.arange(most + 1, dtype=np.float64), context)
        return cls(cycles_s, cost.draft_s(context), cost.plain_s(context), context)

    @property
    def most(self) -> int:
        return len(self.cycles_s) - 1

    def plain_s(self, context: float, batch: int = 1) -> float:
        return self.plain

    def draft_s(self, context: float) -> float:
        return self.draft

    def sizes(self, most: int) -> Ints:
        return np.arange(most + 1)

    def cycle_s(self, nodes: Array, context: float, batch: int = 1) -> Array:
        return self.cycles_s[np.asarray(nodes, dtype=np.int64)]


def draw_rounds(
    process: AcceptanceProcess, rounds: int, seed: int
) -> Iterator[tuple[Lattice, Ints]]:
    """Blocks of independent positions, each with the tokens [gamma] that come true."""
    gamma = process.gamma
    text = np.random.default_rng(seed).integers(0, VOCAB, rounds * gamma + 1)
    session = SimulatedDrafter(Truth([text]), process, vocab=VOCAB, seed=seed).start(text[:1], None)
    request = DraftRequest(depth=gamma, width=WIDTH, growth=TopPaths())
    for start in range(1, rounds * gamma + 1, gamma):
        yield session.draft(text[:start], request), text[start : start + gamma]


def compare(
    process: AcceptanceProcess,
    policies: Mapping[str, Policy],
    cost: CostAt,
    rounds: int,
    seed: int = 0,
) -> tuple[dict[str, Array], Ints]:
    """Play every policy over the same rounds, which pay `cost` whatever it believes itself.

    Returns tokens, seconds and nodes [rounds, 3] by policy, and the tokens [rounds, sizes] that a
    tree of each fixed size 0 .. most commits.
    """
    played: dict[str, list[tuple[float, float, float]]] = {name: [] for name in policies}
    committed = []
    for block, truth in draw_rounds(process, rounds, seed):
        largest = best_first(block, cost.most)
        committed.append(committed_by_size(largest, truth.tolist(), cost.most))
        for name, policy in policies.items():
            played[name].append(play(policy, block, truth, cost))
    return {name: np.array(rows) for name, rows in played.items()}, np.array(committed)


def play(policy: Policy, block: Lattice, truth: Ints, cost: CostAt) -> tuple[float, float, float]:
    """Tokens, seconds and nodes of one round of one policy."""
    context = cost.context
    if not policy.wants_draft(context):
        plain = Accepted([], [], int(truth[0]))
        policy.observe(Round(tree=EMPTY, accepted=plain, context=context, drafted=False))
        return 1, cost.plain, 0
    limits = Limits(nodes=max(policy.max_nodes, 1), depth=len(truth))
    tree = policy.choose(block, context, limits)
    rows = accepted_rows(tree, truth.tolist())
    accepted = Accepted(rows, truth[: len(rows)].tolist(), 0)
    policy.observe(Round(tree=tree, accepted=accepted, context=context))
    return 1 + len(rows), float(cost.cycles_s[tree.nodes]), tree.nodes


def fixed_rates(committed: Ints, cost: CostAt) -> Array:
    """[sizes] tokens per second if every round had verified a tree of that size."""
    return committed.mean(axis=0) / cost.cycles_s


DEVICES = ("a100-sxm-80gb", "h100-sxm", "b200", "rtx-a6000")
TARGET = "qwen3-8b.bfloat16.kernels.tp1.yaml"
# DFlash's 5 layers of the target's 36 and its LM head: 3.2 GB of the 15.1 GB of a plain step.
DRAFT_SHARE = 0.2
FIXED = (1, 3, 7, 15, 31, 63, 127, 255, 511)
CHUNK = 25  # rounds that are resampled together


class RatioBastion(Bastion):
    """`bastion` with the paper's objective: the highest A(N) / C(N) of each round."""

    name = "ratio"

    def __init__(self, cost: CostAt, max_nodes: int) -> None:
        super().__init__(cost, max_nodes)
        self._speed = FadingMean(SPEED_FADING)
        self._speed.mean = lambda: None  # no memory of earlier rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The costs of one device at one context: true, and by the paper's two calibrations."""

    name: str
    true: CostAt
    released: CostAt
    linear: CostAt

    @classmethod
    def of(
        cls,
        name: str,
        profile: Profile,
        draft_share: float,
        most: tuple[int, int],
        buckets: tuple[int, ...] = (),
    ) -> Place:
        """most: (context, nodes of the largest tree); buckets: rows that forwards are padded to."""
        context, _ = most
        cost = replace(CycleCost.from_profile(profile), buckets=buckets)
        if draft_share:
            draft = DrafterSection(
                name="share of a plain step", context=[0],
                median_s=[draft_share * cost.plain_s(context)], mad_s=[0.0], n=[1],
            )  # fmt: skip
            cost = replace(cost, drafter=draft)
        # The paper's rules are priced without padding, as in the decoder.
        released = replace(cost, verify=released_calibration(profile), buckets=())
        linear = replace(cost, verify=profile.linear_calibration(), buckets=())
        true, released, linear = (CostAt.of(one, *most) for one in (cost, released, linear))
        return cls(name=name, true=true, released=released, linear=linear)

    def policies(self) -> dict[str, Policy]:
        most = self.true.most
        return {
            "bastion": Bastion(self.true, most),
            "ratio": RatioBastion(self.true, most),
            "bastion:paper": PaperBastion(self.released, most),
            "bastion:printed": PrintedBastion(self.linear, most),
            "chain": Chain(max_nodes=most),
            "plain": Plain(),
        }


def places() -> list[Place]:
    """The shipped devices, and this machine where its profile exists."""
    folder = shipped_directory()
    places = [
        Place.of(name, Profile.from_yaml(folder / device / TARGET), DRAFT_SHARE, (1024, 511), edges)
        for device in DEVICES
        for name, edges in ((device, ()), (f"{device}, padded", BUCKETS))
    ]
    here = f"*/{DEMO_NAME.rpartition('/')[2].lower()}.bfloat16.eager.tp1.yaml"
    for path in sorted(user_directory().glob(here)):
        profile = Profile.from_yaml(path)
        places.append(Place.of(profile.device.name, profile, 0.0, (256, 127)))
    return places


def chunks(rounds: np.ndarray) -> np.ndarray:
    """[runs, 2] tokens and seconds of `CHUNK` rounds each, of [rounds, 2 or more]."""
    return rounds[: len(rounds) // CHUNK * CHUNK, :2].reshape(-1, CHUNK, 2).sum(axis=1)


def outcome(place: Place, played: Mapping[str, Array], committed: Ints) -> dict[str, Any]:
    """The speed of every policy over the best fixed size."""
    rates = fixed_rates(committed, place.true)
    best = max((n for n in FIXED if n < len(rates)), key=lambda n: rates[n])
    seconds = np.full(len(committed), place.true.cycles_s[best])
    fixed = chunks(np.column_stack([committed[:, best], seconds]))
    return {
        "best_fixed": best,
        "best_fixed_speedup": float(rates[best] * place.true.plain),
        "best_of_all_sizes": int(np.argmax(rates)),
        "policies": {
            name: pooled_ratio(chunks(rounds), fixed) | {"nodes": float(rounds[:, 2].mean())}
            for name, rounds in played.items()
        },
    }


def columns(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The results of all curves as one list for each figure, and a summary of each policy."""
    policies = {}
    for name in results[0]["policies"]:
        by_curve = [result["policies"][name] for result in results]
        ratios = [each["ratio"] for each in by_curve]
        policies[name] = {
            "mean": float(np.mean(ratios)), "worst": float(np.min(ratios)),
            "below_0.99": int(np.sum(np.array(ratios) < 0.99)), "ratio": rounded(ratios),
            "low_95": rounded(each["interval_95"][0] for each in by_curve),
            "high_95": rounded(each["interval_95"][1] for each in by_curve),
            "nodes": rounded(each["nodes"] for each in by_curve),
        }  # fmt: skip
    lists = {key: rounded(r[key] for r in results) for key in results[0] if key != "policies"}
    return lists | {"over_best_fixed": policies}


def rounded(values: Iterable[float]) -> list[float]:
    return [round(value, 4) for value in values]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--place", action="append", help="Only this one; may be repeated.")
    options = parser.parse_args()
    for place in places():
        if options.place and place.name not in options.place:
            continue
        results = []
        for seed, row in enumerate(published_rows()):
            played = compare(process_of(row), place.policies(), place.true, options.rounds, seed)
            results.append(outcome(place, *played))
        figures = {"rounds": options.rounds} | columns(results)
        for name, ratio in figures["over_best_fixed"].items():
            print(f"{place.name} {name}: mean {ratio['mean']:.3f}, worst {ratio['worst']:.3f}")
        stored = json.loads((RESULTS / "controller_simulated.json").read_text(encoding="utf-8"))
        result = {"acceptance": "simulated", "draft_share_of_plain_step": DRAFT_SHARE}
        result["curves"] = [row.label for row in published_rows()]
        store("controller_simulated", result | {"places": stored["places"] | {place.name: figures}})


if __name__ == "__main__":
    main()
