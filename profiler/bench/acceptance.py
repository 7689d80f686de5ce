"""Acceptance of a run in the form that capacity planning reads (`rooftree plan --acceptance`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from costmodel.acceptance_process import recorded
from costmodel.errors import InputError
from profiler.bench.hindsight import fixed_arms
from profiler.bench.record import Arm, Result

LEAST_SPREAD = 0.05


def acceptance_of(result: Result, arm: str | None = None) -> dict[str, Any] | None:
    """Acceptance by depth of a chain arm, or committed tokens of the sweep that an arm is in.

    arm  None takes the chain of the first drafter that has one, else the first sweep; None
         is returned where there is neither
    Raises InputError for an arm that is neither a chain nor of a fixed size.
    """
    if arm is not None:
        found = _of_arm(result, result.arm(arm))
        if found is None:
            raise InputError(
                f"the arm '{arm}' does not tell acceptance by tree size",
                hint="Name a chain, or one arm of a sweep of fixed sizes.",
            )
        return found
    usable = [found for one in result.arms if (found := _of_arm(result, one)) is not None]
    chains = [found for found in usable if "by_depth" in found]
    return next(iter(chains or usable), None)


def acceptance_by_arm(result: Result) -> dict[str, dict[str, Any]]:
    """The same of every arm that has it."""
    every = {arm.name: _of_arm(result, arm) for arm in result.arms}
    return {name: found for name, found in every.items() if found is not None}


def _of_arm(result: Result, arm: Arm) -> dict[str, Any] | None:
    if arm.policy == "chain":
        return _of_chain(result, arm)
    if arm.policy.startswith("fixed:") and arm.drafter is not None:
        return _of_sweep(result, arm)
    return None


def _of_chain(result: Result, arm: Arm) -> dict[str, Any] | None:
    rounds = [one.rounds for one in result.of(arm.name) if one.rounds is not None]
    accepted = [levels for own in rounds for levels in own.accepted]
    drafted = [nodes for own in rounds for nodes in own.nodes]
    if not any(drafted):
        return None
    process = recorded(accepted, drafted, label=arm.name)
    counted = sum(nodes > 0 for nodes in drafted)
    return {
        "arm": arm.name,
        "by_depth": list(process.rank1),
        "rounds": counted,
        "drafted_share": counted / len(drafted),
    }


def _of_sweep(result: Result, arm: Arm) -> dict[str, Any] | None:
    """A(N): what rounds that ask for N nodes commit, the bonus token included.

    Where the drafter had fewer candidates, or none, that is part of what N nodes are worth.
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
        "arm": arm.name,
        "nodes": nodes,
        # The trees are nested, so a larger one never commits less but by chance.
        "committed": np.maximum.accumulate(committed).tolist(),
        "spread": max(LEAST_SPREAD, min(counted) ** -0.5),
    }
