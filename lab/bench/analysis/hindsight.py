"""The sweep of fixed tree sizes, and arms against the size that was best in hindsight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lab.bench.analysis.ratios import Ratio, Tally, paired_ratio, rate, tally_arm
from lab.bench.record import PLAIN, Arm, Result


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSize:
    """One tree size of the sweep; 0 nodes is plain decoding."""

    nodes: int
    arm: str
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HindsightRatios:
    """The speed of one arm over fixed sizes that were picked knowing the outcome.

    The one best on all prompts, that of each set, and that of each prompt, which also profits from
    timing noise.
    """

    arm: str
    single: Ratio | None
    per_set: Ratio | None
    per_prompt: Ratio | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hindsight:
    """The sweep with one drafter. Rates are of decoding alone, after the first token.

    single_best  name of the arm that is fastest on all prompts
    set_best     name of the fastest arm by prompt set
    """

    drafter: str
    sizes: tuple[SweepSize, ...]
    single_best: str
    set_best: dict[str, str]
    single_tokens_per_s: float
    set_tokens_per_s: float
    prompt_tokens_per_s: float
    against: tuple[HindsightRatios, ...]


def hindsight(result: Result, drafter: str) -> Hindsight | None:
    """The sweep of a drafter's fixed sizes, 0 being plain; None where fewer than two were run."""
    arms = [result.arm(PLAIN), *fixed_arms(result, drafter)]
    by_arm = {arm.name: tally_arm(result, arm.name, "decode") for arm in arms}
    rates = {
        name: speed for name, tallies in by_arm.items() if (speed := rate(tallies)) is not None
    }
    if len(arms) < 3 or len(rates) < len(arms):
        return None
    single = max(rates, key=lambda name: rates[name])
    sets = {prompt.id: prompt.set for prompt in result.prompts}
    set_best = {
        name: _best(by_arm, [prompt for prompt, one in sets.items() if one == name])
        for name in result.sets
    }
    by_set = {prompt: by_arm[set_best[sets[prompt]]][prompt] for prompt in by_arm[PLAIN]}
    by_prompt = {prompt: by_arm[_best(by_arm, [prompt])][prompt] for prompt in by_arm[PLAIN]}
    return Hindsight(
        drafter=drafter,
        sizes=tuple(
            SweepSize(nodes=arm.nodes or 0, arm=arm.name, tokens_per_s=rates[arm.name])
            for arm in arms
        ),
        single_best=single,
        set_best=set_best,
        single_tokens_per_s=rates[single],
        set_tokens_per_s=rate(by_set) or 0.0,
        prompt_tokens_per_s=rate(by_prompt) or 0.0,
        against=tuple(
            HindsightRatios(
                arm=arm.name,
                single=paired_ratio(tallies, by_arm[single]),
                per_set=paired_ratio(tallies, by_set),
                per_prompt=paired_ratio(tallies, by_prompt),
            )
            for arm in result.arms
            if arm.drafter == drafter
            and arm.kind == "policy"
            and not arm.policy.startswith("fixed:")
            for tallies in [tally_arm(result, arm.name, "decode")]
        ),
    )


def fixed_arms(result: Result, drafter: str) -> list[Arm]:
    """The arms of a fixed number of best-first nodes with one drafter, smallest tree first."""
    arms = [
        arm
        for arm in result.arms
        if arm.drafter == drafter and arm.policy.startswith("fixed:") and arm.nodes is not None
    ]
    return sorted(arms, key=lambda arm: arm.nodes or 0)


def _best(by_arm: Mapping[str, Mapping[str, Tally]], prompts: Sequence[str]) -> str:
    """The arm that is fastest on these prompts together."""
    return max(
        by_arm, key=lambda name: rate({prompt: by_arm[name][prompt] for prompt in prompts}) or 0.0
    )
