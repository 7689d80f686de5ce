"""The sweep of fixed tree sizes, and what choosing the best of them afterwards would give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from profiler.bench.analysis import Ratio, Tally, paired_ratio, rate, tallies
from profiler.bench.record import PLAIN, Arm, Result


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSize:
    """One tree size of the sweep; 0 nodes is plain decoding."""

    nodes: int
    arm: str
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """One arm against sizes that are picked knowing the outcome.

    single      the one size that is best over all prompts
    per_set     the best size of each prompt set
    per_prompt  the best size of each prompt: it also profits from the noise of the timings
    """

    arm: str
    single: Ratio | None
    per_set: Ratio | None
    per_prompt: Ratio | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hindsight:
    """The sweep with one drafter. Rates are of decoding alone, from the first token on.

    single_best, set_best  names of the arms; of each prompt set
    """

    drafter: str
    sizes: tuple[SweepSize, ...]
    single_best: str
    set_best: dict[str, str]
    single_tokens_per_s: float
    set_tokens_per_s: float
    prompt_tokens_per_s: float
    against: tuple[Against, ...]


def hindsight(result: Result, drafter: str) -> Hindsight | None:
    """The sweep of a drafter's fixed sizes; None where fewer than two were run.

    Plain decoding takes part as the size 0.
    """
    arms = [result.arm(PLAIN), *fixed_arms(result, drafter)]
    every = {arm.name: tallies(result, arm.name, "decode") for arm in arms}
    rates = {name: found for name, own in every.items() if (found := rate(own)) is not None}
    if len(arms) < 3 or len(rates) < len(arms):
        return None
    single = max(rates, key=lambda name: rates[name])
    sets = {prompt.id: prompt.set for prompt in result.prompts}
    set_best = {name: _best_of(result, every, name) for name in result.sets}
    by_set = _picked(every, lambda prompt: set_best[sets[prompt]])
    by_prompt = _picked(every, lambda prompt: _best_for(every, prompt))
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
            Against(
                arm=arm.name,
                single=paired_ratio(own, every[single]),
                per_set=paired_ratio(own, by_set),
                per_prompt=paired_ratio(own, by_prompt),
            )
            for arm in result.arms
            if arm.drafter == drafter
            and arm.kind == "policy"
            and not arm.policy.startswith("fixed:")
            for own in [tallies(result, arm.name, "decode")]
        ),
    )


def fixed_arms(result: Result, drafter: str) -> list[Arm]:
    """The arms of a fixed number of best-first nodes with one drafter, ascending."""
    found = [
        arm
        for arm in result.arms
        if arm.drafter == drafter and arm.policy.startswith("fixed:") and arm.nodes is not None
    ]
    return sorted(found, key=lambda arm: arm.nodes or 0)


def _best_of(result: Result, every: Mapping[str, Mapping[str, Tally]], prompt_set: str) -> str:
    inside = {prompt.id for prompt in result.prompts if prompt.set == prompt_set}

    def set_rate(name: str) -> float:
        return rate({key: own for key, own in every[name].items() if key in inside}) or 0.0

    return max(every, key=set_rate)


def _best_for(every: Mapping[str, Mapping[str, Tally]], prompt: str) -> str:
    return max(every, key=lambda name: rate({prompt: every[name][prompt]}) or 0.0)


def _picked(
    every: Mapping[str, Mapping[str, Tally]], choose: Callable[[str], str]
) -> dict[str, Tally]:
    """Each prompt's tally by the arm that is chosen for it."""
    return {prompt: every[choose(prompt)][prompt] for prompt in every[PLAIN]}
