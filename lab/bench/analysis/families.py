"""Related drafters compared: SpecBlock's ablations, DFlash's block sizes, online updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lab.bench.analysis.ratios import Ratio, compare_arms
from lab.bench.record import Arm, Model, Result


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyArm:
    """One drafter's arm in a family, and its decoding speed over the base arm's."""

    arm: str
    drafter: str
    without: tuple[str, ...]  # parts that a SpecBlock drafter lacks
    block_size: int | None  # of a DFlash drafter; None where it is chosen for each text
    over_base: Ratio | None  # None for the base itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Arms of one policy whose drafters differ in one respect.

    base  name of the arm with the whole SpecBlock drafter, or with BlockPilot; None without one
    """

    policy: str
    base: str | None
    members: tuple[FamilyArm, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateFigures:
    """An arm whose drafter was updated between texts.

    texts         by their use for training: skip, heads, full
    updates       by the part they trained
    update_share  `update_s` over the arm's whole time
    fixed         the arm of the same policy and weights without updates; None without one
    over_fixed    decoding alone; `end_to_end_over_fixed` is of whole calls and the updates
    """

    arm: str
    updater: str
    texts: dict[str, int]
    updates: dict[str, int]
    rollbacks: int
    update_s: float
    update_share: float
    fixed: str | None
    over_fixed: Ratio | None
    end_to_end_over_fixed: Ratio | None


def ablations(result: Result) -> list[Family]:
    """SpecBlock drafters without updates; empty where a run holds fewer than two."""
    drafters = [one for one in result.drafters if one.kind == "specblock" and not one.updates]
    return _families(result, drafters, lambda drafter: not drafter.without)


def block_sizes(result: Result) -> list[Family]:
    """DFlash drafters of the same weights, and BlockPilot over them; empty for fewer than two."""
    families = []
    for first in result.drafters:
        if first.same_as is None and first.kind in ("dflash", "blockpilot"):
            same = [one for one in result.drafters if (one.same_as or one.name) == first.name]
            same.sort(key=lambda one: (one.block_size is None, one.block_size))
            families += _families(result, same, lambda one: one.kind == "blockpilot")
    return families


def update_figures(result: Result) -> list[UpdateFigures]:
    """The arms whose drafters were updated, in the order of the run."""
    figures = []
    for arm in result.arms:
        if not arm.updates:
            continue
        responses, fixed = result.of(arm.name), _fixed(result, arm)
        made = [one.update for one in responses if one.update is not None]
        update_s = sum(one.seconds for one in made)
        over = {
            part: None if fixed is None else compare_arms(result, arm.name, fixed, part)
            for part in ("decode", "total")
        }
        figures.append(
            UpdateFigures(
                arm=arm.name,
                updater=arm.updates,
                texts=dict(Counter(one.action for one in made)),
                updates=dict(Counter(one.action for one in made if one.trained)),
                rollbacks=sum(one.rollback for one in made),
                update_s=update_s,
                update_share=update_s / sum(one.occupied_s for one in responses),
                fixed=fixed,
                over_fixed=over["decode"],
                end_to_end_over_fixed=over["total"],
            )
        )
    return figures


def _families(
    result: Result, drafters: Sequence[Model], is_base: Callable[[Model], bool]
) -> list[Family]:
    """One family for each policy that ran with two or more of the drafters."""
    if len(drafters) < 2:
        return []
    policies = dict.fromkeys(arm.policy for arm in result.study("policies") if arm.drafter)
    families = []
    for policy in policies:
        arms = [
            (arm, one)
            for one in drafters
            for arm in result.arms
            if (arm.kind, arm.policy, arm.variant, arm.drafter) == ("policy", policy, "", one.name)
        ]
        if len(arms) < 2:
            continue
        base = next((arm.name for arm, one in arms if is_base(one)), None)
        members = []
        for arm, one in arms:
            over = None if base in (None, arm.name) else compare_arms(result, arm.name, base)
            part = {"without": one.without, "block_size": one.block_size}
            members.append(FamilyArm(arm=arm.name, drafter=one.name, over_base=over, **part))
        families.append(Family(policy=policy, base=base, members=tuple(members)))
    return families


def _fixed(result: Result, arm: Arm) -> str | None:
    """The arm with the same policy and first weights whose drafter is not updated."""
    models = {one.name: one for one in result.drafters}
    own = models[arm.drafter or ""]
    for other in result.arms:
        drafter = models.get(other.drafter or "")
        if (
            drafter is not None
            and (other.kind, other.policy, other.variant) == (arm.kind, arm.policy, arm.variant)
            and not other.updates
            and (drafter.same_as or drafter.name) == (own.same_as or own.name)
        ):
            return other.name
    return None
