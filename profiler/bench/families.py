"""Drafters of one kind beside each other: SpecBlock's ablations, DFlash's block sizes, updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from profiler.bench.analysis import Ratio, compare_arms
from profiler.bench.figures import arm_figures
from profiler.bench.record import Arm, Model, Result


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One drafter's arm in a family.

    without      parts that a SpecBlock drafter lacks
    block_size   of a DFlash drafter; None where it is chosen for each text
    over_base    its speed over that of the family's base, prompt by prompt; None for the base
    """

    arm: str
    drafter: str
    without: tuple[str, ...]
    block_size: int | None
    tokens_per_s: float | None
    tokens_per_verification: float | None
    over_plain: Ratio | None
    over_base: Ratio | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Arms of one policy whose drafters differ in one respect; figures of decoding alone.

    base  the arm of the whole SpecBlock drafter, or of BlockPilot; None where it was not run
    """

    kind: Literal["ablations", "block sizes"]
    policy: str
    base: str | None
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Updates:
    """An arm whose drafter was updated between texts.

    texts        by what they were kept for: skip, heads, full
    updates      that were made, by what they trained
    update_s     seconds of all that lay between texts; `update_share` of the arm's whole time
    fixed        the arm of the same policy and weights without updates; None where there is none
    over_fixed   its speed over that arm's, decoding alone
    end_to_end_* of whole calls with the updates behind them
    """

    arm: str
    updater: str
    texts: dict[str, int]
    updates: dict[str, int]
    rollbacks: int
    update_s: float
    update_share: float
    tokens_per_s: float | None
    end_to_end_tokens_per_s: float | None
    tokens_per_verification: float | None
    over_plain: Ratio | None
    end_to_end_over_plain: Ratio | None
    fixed: str | None
    fixed_tokens_per_verification: float | None
    over_fixed: Ratio | None
    end_to_end_over_fixed: Ratio | None


def ablations(result: Result) -> list[Family]:
    """SpecBlock drafters that are not updated, where a run holds several of them."""
    own = [one for one in result.drafters if one.kind == "specblock" and not one.updates]
    return _families(result, "ablations", own, lambda drafter: not drafter.without)


def block_sizes(result: Result) -> list[Family]:
    """DFlash drafters of the same weights and BlockPilot's choice, where there are several."""
    found = []
    for first in result.drafters:
        if first.same_as is None and first.kind in ("dflash", "blockpilot"):
            own = [one for one in result.drafters if weights_of(one) == first.name]
            own.sort(key=lambda one: (one.block_size is None, one.block_size))
            found += _families(result, "block sizes", own, lambda one: one.kind == "blockpilot")
    return found


def updates(result: Result) -> list[Updates]:
    """The arms whose drafters were updated, in the order of the run."""
    return [_updates(result, arm) for arm in result.arms if arm.updates]


def weights_of(drafter: Model) -> str:
    """The first drafter of the run with the same weights: its own name, or an earlier one."""
    return drafter.same_as or drafter.name


def _families(
    result: Result,
    kind: Literal["ablations", "block sizes"],
    drafters: Sequence[Model],
    is_base: Callable[[Model], bool],
) -> list[Family]:
    """One for each policy that two or more of the drafters have run with."""
    if len(drafters) < 2:
        return []
    policies = dict.fromkeys(arm.policy for arm in result.study("policies") if arm.drafter)
    found = []
    for policy in policies:
        arms = [(arm, one) for one in drafters for arm in _arms(result, policy, one)]
        if len(arms) < 2:
            continue
        base = next((arm.name for arm, one in arms if is_base(one)), None)
        members = tuple(_member(result, arm, one, base) for arm, one in arms)
        found.append(Family(kind=kind, policy=policy, base=base, members=members))
    return found


def _arms(result: Result, policy: str, drafter: Model) -> list[Arm]:
    return [
        arm
        for arm in result.arms
        if (arm.kind, arm.policy, arm.variant, arm.drafter) == ("policy", policy, "", drafter.name)
    ]


def _member(result: Result, arm: Arm, drafter: Model, base: str | None) -> Member:
    own = arm_figures(result, arm.name)
    alone = base is None or base == arm.name
    return Member(
        arm=arm.name,
        drafter=drafter.name,
        without=drafter.without,
        block_size=drafter.block_size,
        tokens_per_s=own.tokens_per_s,
        tokens_per_verification=own.tokens_per_verification,
        over_plain=own.over_plain,
        over_base=None if alone else compare_arms(result, arm.name, base or ""),
    )


def _updates(result: Result, arm: Arm) -> Updates:
    own = arm_figures(result, arm.name)
    made = [one.update for one in result.of(arm.name) if one.update is not None]
    update_s = sum(one.seconds for one in made)
    fixed = _fixed(result, arm)
    before = None if fixed is None else arm_figures(result, fixed).tokens_per_verification
    return Updates(
        arm=arm.name,
        updater=arm.updates,
        texts=dict(Counter(one.action for one in made)),
        updates=dict(Counter(one.action for one in made if one.trained)),
        rollbacks=sum(one.rollback for one in made),
        update_s=update_s,
        update_share=update_s / sum(one.occupied_s for one in result.of(arm.name)),
        tokens_per_s=own.tokens_per_s,
        end_to_end_tokens_per_s=own.end_to_end_tokens_per_s,
        tokens_per_verification=own.tokens_per_verification,
        over_plain=own.over_plain,
        end_to_end_over_plain=own.over_plain_end_to_end,
        fixed=fixed,
        fixed_tokens_per_verification=before,
        over_fixed=None if fixed is None else compare_arms(result, arm.name, fixed),
        end_to_end_over_fixed=None if fixed is None else compare_arms(
            result, arm.name, fixed, "total"
        ),
    )  # fmt: skip


def _fixed(result: Result, arm: Arm) -> str | None:
    """The arm that began as this one and was not updated."""
    models = {one.name: one for one in result.drafters}
    weights = weights_of(models[arm.drafter or ""])
    for other in result.arms:
        drafter = models.get(other.drafter or "")
        if (
            drafter is not None
            and (other.kind, other.policy, other.variant) == (arm.kind, arm.policy, arm.variant)
            and not other.updates
            and weights_of(drafter) == weights
        ):
            return other.name
    return None
