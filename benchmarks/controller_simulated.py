"""The controller on every published acceptance curve, without a model and without noise.

    python -m benchmarks.controller_simulated [--rounds 1500]

Costs are the shipped composed profiles of Qwen3-8B, and a measured profile of this machine
where there is one. Policies see the same drawn blocks and pay what the profile says; the
paper's controller believes the same profile's linear calibration, as in the paper. `ratio`
is our controller with the paper's objective, each round's own highest A(N) / C(N); all else
is equal, so its difference is that of the objective. Intervals are paired bootstraps over
runs of 25 rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.common import store
from costmodel.cycle import CycleCost
from costmodel.files import shipped_directory
from costmodel.profile import Profile
from costmodel.published_acceptance import process_of, published_rows
from costmodel.registry import user_directory
from costmodel.stages import DrafterSection
from decoder.demo_model import DEMO_NAME
from decoder.policies import Bastion, Chain, Plain, Policy
from decoder.policies.bastion import PaperBastion
from decoder.policies.bias import Pace
from profiler.rounds import paired_ratio
from profiler.simulation import CostAt, Played, Setting, compare

DEVICES = ("a100-sxm-80gb", "h100-sxm", "b200", "rtx-a6000")
TARGET = "qwen3-8b.bfloat16.kernels.tp1.yaml"
# DFlash's 5 layers of the target's 36 and its LM head: 3.2 GB of the 15.1 GB of a plain step.
DRAFT_SHARE = 0.2
FIXED = (1, 3, 7, 15, 31, 63, 127, 255, 511)
CHUNK = 25  # rounds that are drawn together


class _NoPace(Pace):
    """Knows of no speed but the round's own."""

    def speed(self) -> None:
        return None


class RatioBastion(Bastion):
    """Ours with the paper's objective: each round's own highest A(N) / C(N)."""

    name = "ratio"

    def __init__(self, cost: CostAt, max_nodes: int) -> None:
        super().__init__(cost, max_nodes)
        self._pace = _NoPace()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Costs of one device at one context: the true ones, and the paper's linear ones."""

    name: str
    context: int
    max_nodes: int
    true: CostAt
    linear: CostAt

    @classmethod
    def of(cls, name: str, profile: Profile, draft_share: float, most: tuple[int, int]) -> Place:
        """most: the context and the largest tree."""
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
        linear = replace(cost, verify=profile.linear_calibration())
        return cls(
            name=name,
            context=context,
            max_nodes=max_nodes,
            true=CostAt.of(cost, context, max_nodes),
            linear=CostAt.of(linear, context, max_nodes),
        )

    def policies(self) -> dict[str, Policy]:
        return {
            "bastion": Bastion(self.true, self.max_nodes),
            "ratio": RatioBastion(self.true, self.max_nodes),
            "bastion:paper": PaperBastion(self.linear, self.max_nodes),
            "chain": Chain(max_nodes=self.max_nodes),
            "plain": Plain(),
        }


def places() -> list[Place]:
    """The shipped devices, and this machine where it has been measured."""
    folder = shipped_directory()
    found = [
        Place.of(device, Profile.from_yaml(folder / device / TARGET), DRAFT_SHARE, (1024, 511))
        for device in DEVICES
    ]
    here = f"*/{DEMO_NAME.rpartition('/')[2].lower()}.bfloat16.eager.tp1.yaml"
    for path in sorted(user_directory().glob(here)):
        profile = Profile.from_yaml(path)
        found.append(Place.of(profile.device.name, profile, 0.0, (256, 127)))
    return found


def chunks(rounds: np.ndarray) -> np.ndarray:
    """[runs, 2] tokens and seconds of runs of rounds [rounds, 2 or more]."""
    return rounds[: len(rounds) // CHUNK * CHUNK, :2].reshape(-1, CHUNK, 2).sum(axis=1)


def outcome(place: Place, played: dict[str, Played], hindsight: Any) -> dict[str, Any]:
    """Every policy's speed over the best fixed size's."""
    rates = hindsight.fixed_rates()
    best = max((n for n in FIXED if n <= place.max_nodes), key=lambda n: rates[n])
    fixed = np.stack([hindsight.committed[:, best], hindsight.seconds[:, best]], axis=1)
    return {
        "best_fixed": best,
        "best_fixed_speedup": float(rates[best] * place.true.plain),
        "best_of_all_sizes": hindsight.best_fixed()[0],
        "oracle": hindsight.oracle()[1] / float(rates[best]),
        "policies": {
            name: paired_ratio(chunks(run.rounds), chunks(fixed)) | {"nodes": run.mean_nodes}
            for name, run in played.items()
        },
    }


def columns(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The results of all curves of a place, one list a figure, and a summary of each policy."""
    policies = {}
    for name in results[0]["policies"]:
        found = [result["policies"][name] for result in results]
        ratios = [each["ratio"] for each in found]
        policies[name] = {
            "mean": float(np.mean(ratios)),
            "worst": float(np.min(ratios)),
            "below_0.99": int(np.sum(np.array(ratios) < 0.99)),
            "ratio": rounded(ratios),
            "low_95": rounded(each["interval_95"][0] for each in found),
            "high_95": rounded(each["interval_95"][1] for each in found),
            "nodes": rounded(each["nodes"] for each in found),
        }
    kept = {key: rounded(r[key] for r in results) for key in results[0] if key != "policies"}
    return kept | {"over_best_fixed": policies}


def rounded(values: Iterable[float]) -> list[float]:
    return [round(value, 4) for value in values]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1500)
    options = parser.parse_args()
    stored: dict[str, Any] = {
        "acceptance": "simulated",
        "rounds": options.rounds,
        "draft_share_of_plain_step": DRAFT_SHARE,
        "curves": [row.label for row in published_rows()],
        "places": {},
    }
    for place in places():
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
        stored["places"][place.name] = columns(results)
        for name, found in stored["places"][place.name]["over_best_fixed"].items():
            print(f"{place.name} {name}: mean {found['mean']:.3f}, worst {found['worst']:.3f}")
    store("controller_simulated", stored)


if __name__ == "__main__":
    main()
