"""The adaptive policy on every published acceptance curve, simulated without a model.

    python -m lab.studies.controller_simulated [--rounds 1500] [--place h100-sxm]

Costs come from the shipped composed profiles of Qwen3-8B, and from a measured profile of this
machine where there is one. All policies see the same drawn blocks and pay the profile's costs.
`bastion:paper`, the rule of the paper's public code, predicts with the profile's two-branch
calibration as that code does, and `bastion:printed`, the rule of its text, with the linear one.
`ratio` is `bastion` with the paper's objective, the highest A(N) / C(N) of each round, and shows
the effect of the objective alone. Intervals are paired bootstraps over runs of 25 rounds. A place
whose profile is not at hand keeps its stored figures.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from costmodel.acceptance import process_of, published_rows
from costmodel.io import shipped_directory
from costmodel.online.cycle import CycleCost
from costmodel.profile.profile import Profile
from costmodel.profile.schema import DrafterSection
from costmodel.profile.store import user_directory
from decoder.model.demo_model import DEMO_NAME
from decoder.policies.base import Policy
from decoder.policies.bastion import Bastion, DecodingSpeed
from decoder.policies.shapes import Chain, Plain
from lab.papers.bastion.policy import PaperBastion, PrintedBastion, released_calibration
from lab.studies.common import RESULTS, pooled_ratio, store
from lab.studies.policy_simulation import CostAt, Played, Setting, compare

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
        self._speed = DecodingSpeed()
        self._speed.tokens_per_step = lambda: None  # no memory of earlier rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The costs of one device at one context: true, and by the paper's two calibrations."""

    name: str
    context: int
    max_nodes: int
    true: CostAt
    released: CostAt
    linear: CostAt

    @classmethod
    def of(cls, name: str, profile: Profile, draft_share: float, most: tuple[int, int]) -> Place:
        """most: (context, nodes of the largest tree)."""
        context, max_nodes = most
        cost = CycleCost.from_profile(profile)
        if draft_share:
            draft = DrafterSection(
                name="share of a plain step",
                context=[0],
                median_s=[draft_share * cost.plain_s(context)],
                mad_s=[0.0],
                n=[1],
            )
            cost = replace(cost, drafter=draft)
        released = replace(cost, verify=released_calibration(profile))
        linear = replace(cost, verify=profile.linear_calibration())
        return cls(
            name=name,
            context=context,
            max_nodes=max_nodes,
            true=CostAt.of(cost, context, max_nodes),
            released=CostAt.of(released, context, max_nodes),
            linear=CostAt.of(linear, context, max_nodes),
        )

    def policies(self) -> dict[str, Policy]:
        return {
            "bastion": Bastion(self.true, self.max_nodes),
            "ratio": RatioBastion(self.true, self.max_nodes),
            "bastion:paper": PaperBastion(self.released, self.max_nodes),
            "bastion:printed": PrintedBastion(self.linear, self.max_nodes),
            "chain": Chain(max_nodes=self.max_nodes),
            "plain": Plain(),
        }


def places() -> list[Place]:
    """The shipped devices, and this machine where its profile exists."""
    folder = shipped_directory()
    places = [
        Place.of(device, Profile.from_yaml(folder / device / TARGET), DRAFT_SHARE, (1024, 511))
        for device in DEVICES
    ]
    here = f"*/{DEMO_NAME.rpartition('/')[2].lower()}.bfloat16.eager.tp1.yaml"
    for path in sorted(user_directory().glob(here)):
        profile = Profile.from_yaml(path)
        places.append(Place.of(profile.device.name, profile, 0.0, (256, 127)))
    return places


def chunks(rounds: np.ndarray) -> np.ndarray:
    """[runs, 2] tokens and seconds of `CHUNK` rounds each, of [rounds, 2 or more]."""
    return rounds[: len(rounds) // CHUNK * CHUNK, :2].reshape(-1, CHUNK, 2).sum(axis=1)


def outcome(place: Place, played: dict[str, Played], hindsight: Any) -> dict[str, Any]:
    """The speed of every policy over the best fixed size."""
    rates = hindsight.fixed_rates()
    best = max((n for n in FIXED if n <= place.max_nodes), key=lambda n: rates[n])
    fixed = np.stack([hindsight.committed[:, best], hindsight.seconds[:, best]], axis=1)
    return {
        "best_fixed": best,
        "best_fixed_speedup": float(rates[best] * place.true.plain),
        "best_of_all_sizes": hindsight.best_fixed()[0],
        "oracle": hindsight.oracle()[1] / float(rates[best]),
        "policies": {
            name: pooled_ratio(chunks(run.rounds), chunks(fixed))
            | {"nodes": float(run.rounds[:, 2].mean())}
            for name, run in played.items()
        },
    }


def columns(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The results of all curves as one list for each figure, and a summary of each policy."""
    policies = {}
    for name in results[0]["policies"]:
        by_curve = [result["policies"][name] for result in results]
        ratios = [each["ratio"] for each in by_curve]
        policies[name] = {
            "mean": float(np.mean(ratios)),
            "worst": float(np.min(ratios)),
            "below_0.99": int(np.sum(np.array(ratios) < 0.99)),
            "ratio": rounded(ratios),
            "low_95": rounded(each["interval_95"][0] for each in by_curve),
            "high_95": rounded(each["interval_95"][1] for each in by_curve),
            "nodes": rounded(each["nodes"] for each in by_curve),
        }
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
            setting = Setting(
                cost=place.true,
                context=place.context,
                max_nodes=place.max_nodes,
                rounds=options.rounds,
                seed=seed,
            )
            played, hindsight = compare(process_of(row), place.policies(), setting)
            results.append(outcome(place, played, hindsight))
        figures = {"rounds": options.rounds} | columns(results)
        for name, ratio in figures["over_best_fixed"].items():
            print(f"{place.name} {name}: mean {ratio['mean']:.3f}, worst {ratio['worst']:.3f}")
        stored = json.loads((RESULTS / "controller_simulated.json").read_text(encoding="utf-8"))
        result = {"acceptance": "simulated", "draft_share_of_plain_step": DRAFT_SHARE}
        result["curves"] = [row.label for row in published_rows()]
        store("controller_simulated", result | {"places": stored["places"] | {place.name: figures}})


if __name__ == "__main__":
    main()
