"""Planned speedups of draft chains and trees against those that a paper measured on an A100.

    python -m lab.studies.plan_speedups

Measured: table 1 of the BASTION paper (A100, one request, temperature 0; rows DFlash, a chain of
15, and BASTION, trees), whose runtime is not ours and whose plain steps are slower. Planned: from
the shipped, composed profiles and the same table's acceptance lengths, for requests of 200 + 800
tokens, which the paper does not state. Nothing is fitted to the speedups.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from costmodel.catalog import resolve_target
from costmodel.io import shipped_directory
from costmodel.planning.acceptance import Acceptance, chain_curve, tree_curve
from costmodel.planning.request import PlanRequest, ServingPolicy
from costmodel.planning.search import make_server
from costmodel.planning.sources import forward_for
from costmodel.planning.traffic import Traffic
from costmodel.profile.store import ProfileStore
from lab.bench.simulated import published
from lab.studies.common import PUBLISHED, store

DATASETS, SPEEDUPS = PUBLISHED["datasets"], PUBLISHED["speedups"]
MEASURED = {(target, shape): row for target, of in SPEEDUPS.items() for shape, row in of.items()}
TRAFFIC = Traffic(prompt_tokens=200, output_tokens=800)


def planned(target: str, dataset: str, shape: str) -> float:
    """Time per token of plain decoding over that with drafts, one request at once."""
    request = PlanRequest(
        target=target, gpus=("a100-sxm-80gb",), traffic=TRAFFIC, rate=1.0, acceptance=dataset,
        engine="rooftree",
    )  # fmt: skip
    profiles = ProfileStore([shipped_directory()])
    vllm = dataclasses.replace(request, engine="vllm")
    steps = forward_for(vllm, resolve_target(target), (request.gpus[0], 1), profiles)
    process = published("bastion", dataset, target=target.lower().rpartition("/")[2])
    chain, tree = chain_curve(process), tree_curve(process)
    if shape == "chain":  # a tree of 15 nodes that is this chain
        tree = np.concatenate([chain, np.full(len(tree) - len(chain), chain[-1])])
    acceptance = Acceptance(
        label=process.label, kind="published", chain=chain, tree=tree, spread=0.0
    )
    policy = ServingPolicy(kind="fixed", nodes=15) if shape == "chain" else ServingPolicy()
    drafts = make_server(dataclasses.replace(request, policy=policy), steps, acceptance)
    plain = dataclasses.replace(request, policy=ServingPolicy(kind="plain"), acceptance=None)
    before = make_server(plain, steps, None).best(TRAFFIC, 1)
    return before.tpot_s / drafts.best(TRAFFIC, 1).tpot_s


def compare(target: str, shape: str) -> dict[str, Any]:
    """Both speedups of each data set, and the relative error."""
    measured = np.array(MEASURED[target, shape])
    found = np.array([planned(target, dataset, shape) for dataset in DATASETS])
    error = found / measured - 1
    return {
        "target": target, "shape": shape, "datasets": DATASETS,
        "measured": measured.tolist(), "planned": [round(float(x), 3) for x in found],
        "mean_error": round(float(np.mean(np.abs(error))), 4),
        "bias": round(float(np.mean(error)), 4),
    }  # fmt: skip


def main() -> None:
    rows = [compare(target, shape) for target, shape in MEASURED]
    for row in rows:
        print(f"{row['target']} {row['shape']}: {row['mean_error']:.1%}, bias {row['bias']:+.1%}")
    store("plan_speedups", {"rows": rows})


if __name__ == "__main__":
    main()
