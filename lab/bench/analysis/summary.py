"""All figures of a result: computed once for tables and pictures, and as one JSON record.

The record also holds acceptance in the form that `rooftree plan --acceptance` reads.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import cached_property
from typing import Any

import numpy as np

from costmodel.acceptance import recorded
from lab.bench.analysis.families import ablations, block_sizes, update_figures
from lab.bench.analysis.figures import ArmFigures, arm_figures
from lab.bench.analysis.hindsight import Hindsight, fixed_arms, hindsight
from lab.bench.analysis.papers import paper_figures
from lab.bench.record import Arm, Result

LEAST_SPREAD = 0.05


class ResultFigures:
    """The figures of one result, each computed when it is first read."""

    def __init__(self, result: Result) -> None:
        self.result = result
        self._figures: dict[tuple[str, str | None], ArmFigures] = {}

    def of(self, arm: str, prompt_set: str | None = None) -> ArmFigures:
        """The figures of one arm over one prompt set, or over all."""
        key = (arm, prompt_set)
        if key not in self._figures:
            self._figures[key] = arm_figures(self.result, arm, prompt_set)
        return self._figures[key]

    @cached_property
    def hindsight(self) -> dict[str, Hindsight]:
        """The sweeps by drafter, of those whose tree sizes were swept."""
        sweeps = {one.name: hindsight(self.result, one.name) for one in self.result.drafters}
        return {drafter: sweep for drafter, sweep in sweeps.items() if sweep is not None}


def derived(result: Result) -> dict[str, Any]:
    """The derived part of a result file, for readers that compute nothing themselves.

    `acceptance` is that of the first chain, else of the first sweep; None without either.
    """
    by_arm = acceptance_by_arm(result)
    chains = [one for one in by_arm.values() if "by_depth" in one]
    return {
        "summary": summarise(result),
        "acceptance": next(iter(chains or by_arm.values()), None),
        "acceptance_by_arm": by_arm,
    }


def summarise(result: Result) -> dict[str, Any]:
    """Figures of every arm over all prompts and by set, sweeps, and families of drafters."""
    figures = ResultFigures(result)
    return {
        "arms": [asdict(figures.of(arm.name)) for arm in result.arms],
        "sets": {
            name: [asdict(figures.of(arm.name, name)) for arm in result.arms]
            for name in result.sets
        },
        "papers": [asdict(paper_figures(result, arm.name)) for arm in result.arms],
        "hindsight": [asdict(sweep) for sweep in figures.hindsight.values()],
        "updates": [asdict(one) for one in update_figures(result)],
        "ablations": [asdict(family) for family in ablations(result)],
        "block_sizes": [asdict(family) for family in block_sizes(result)],
    }


def acceptance_by_arm(result: Result) -> dict[str, dict[str, Any]]:
    """By depth for each chain arm, committed tokens by size for each arm of a sweep."""
    by_arm = {}
    for arm in result.arms:
        if arm.policy == "chain":
            by_arm[arm.name] = _of_chain(result, arm)
        elif arm.policy.startswith("fixed:") and arm.drafter is not None:
            by_arm[arm.name] = _of_sweep(result, arm)
    return {name: acceptance for name, acceptance in by_arm.items() if acceptance is not None}


def _measured_of(result: Result, arm: Arm) -> dict[str, str]:
    """The target, drafter and policy that an arm's acceptance belongs to, for capacity planning."""
    drafter = next((model for model in result.drafters if model.name == arm.drafter), None)
    said = {
        "arm": arm.name,
        "target": result.target.name,
        "target_hash": result.target.hash,
        "drafter": arm.drafter,
        "drafter_hash": drafter and drafter.hash,
        "drafter_kind": drafter and drafter.kind,
        "policy": "fixed" if arm.nodes else arm.policy,
    }
    return {name: value for name, value in said.items() if value}


def _of_chain(result: Result, arm: Arm) -> dict[str, Any] | None:
    rounds = [one.rounds for one in result.of(arm.name) if one.rounds is not None]
    accepted = [levels for one in rounds for levels in one.accepted]
    drafted = [nodes for one in rounds for nodes in one.nodes]
    if not any(drafted):
        return None
    process = recorded(accepted, drafted, label=arm.name)
    counted = sum(nodes > 0 for nodes in drafted)
    return {
        **_measured_of(result, arm),
        "by_depth": list(process.rank1),
        "rounds": counted,
        "drafted_share": counted / len(drafted),
    }


def _of_sweep(result: Result, arm: Arm) -> dict[str, Any] | None:
    """A(N): mean tokens committed by rounds with a budget of N nodes, the bonus token included.

    Rounds whose drafter had fewer than N candidates, or none, count too.
    """
    nodes, committed, counted = [0], [1.0], []
    for fixed in fixed_arms(result, arm.drafter or ""):
        lengths = [
            accepted + 1
            for one in result.of(fixed.name)
            if one.rounds is not None
            for accepted in one.rounds.accepted
        ]
        if lengths and fixed.nodes is not None:
            nodes.append(fixed.nodes)
            committed.append(float(np.mean(lengths)))
            counted.append(len(lengths))
    if not counted:
        return None
    return {
        **_measured_of(result, arm),
        "nodes": nodes,
        # Best-first trees are nested: a larger one commits less only by chance.
        "committed": np.maximum.accumulate(committed).tolist(),
        "spread": max(LEAST_SPREAD, min(counted) ** -0.5),
    }
