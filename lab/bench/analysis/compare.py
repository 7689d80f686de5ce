"""Comparison of two results of the same prompts, arm by arm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from costmodel.errors import InputError
from lab.bench.analysis.ratios import Ratio, Tally, paired_ratio, tally_arm
from lab.bench.record import PLAIN, Result

# Settings that must agree for two runs to have done the same work.
SAME_WORK = ("new_tokens", "temperature", "same_text")
# Settings that may differ, with a warning.
WARNED = ("dtype", "runtime", "device")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmComparison:
    """One arm in both results.

    ratio         its decoding speed in the second result over that in the first, paired by prompt
    beside_plain  the same ratio with each prompt's times divided by those of plain decoding in
                  the same run, which cancels changes of the whole machine
    differing     number of prompts whose texts differ
    """

    arm: str
    ratio: Ratio | None
    beside_plain: Ratio | None
    differing: int

    @property
    def verdict(self) -> str:
        return "undecided" if self.ratio is None else self.ratio.verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The arms of both results, those of one result only, and other differences."""

    arms: tuple[ArmComparison, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    warnings: tuple[str, ...]


def compare_results(first: Result, second: Result) -> Comparison:
    """Compare the arms of two results.

    Raises InputError that lists the differences where the two runs did other work.
    """
    _check_same_work(first, second)
    names = [arm.name for arm in first.arms]
    others = [arm.name for arm in second.arms]
    return Comparison(
        arms=tuple(_arm(first, second, name) for name in names if name in others),
        only_first=tuple(name for name in names if name not in others),
        only_second=tuple(name for name in others if name not in names),
        warnings=tuple(_differences(first, second)),
    )


def _arm(first: Result, second: Result, name: str) -> ArmComparison:
    before, after = (tally_arm(result, name, "decode") for result in (first, second))
    plain_before, plain_after = (tally_arm(result, PLAIN, "decode") for result in (first, second))
    texts = {one.key: one.tokens for one in first.of(name)}
    return ArmComparison(
        arm=name,
        ratio=paired_ratio(after, before),
        beside_plain=paired_ratio(
            _in_plain_steps(after, plain_after), _in_plain_steps(before, plain_before)
        ),
        differing=len(
            {one.prompt for one in second.of(name) if texts.get(one.key, one.tokens) != one.tokens}
        ),
    )


def _in_plain_steps(arm: Mapping[str, Tally], plain: Mapping[str, Tally]) -> dict[str, Tally]:
    """An arm's times as multiples of a plain token's time on the same prompt."""
    return {
        prompt: Tally(tally.tokens, tally.seconds * base.tokens / base.seconds)
        for prompt, tally in arm.items()
        if (base := plain[prompt]).tokens and base.seconds > 0
    }


def _check_same_work(first: Result, second: Result) -> None:
    problems = [
        f"{name} is {_setting(first, name)} and {_setting(second, name)}"
        for name in SAME_WORK
        if _setting(first, name) != _setting(second, name)
    ]
    prompts, others = ({p.id: p.hash for p in result.prompts} for result in (first, second))
    if prompts.keys() != others.keys():
        unshared = prompts.keys() ^ others.keys()
        problems.append(f"{len(unshared)} prompts are in one of them only, as '{min(unshared)}'")
    elif changed := [name for name in prompts if prompts[name] != others[name]]:
        problems.append(
            f"{len(changed)} prompts have other tokens (text, chat template or tokenizer), as "
            f"'{changed[0]}'"
        )
    if problems:
        raise InputError(
            f"the two results cannot be compared: {'; '.join(problems)}",
            hint="Run the second with the settings of the first.",
        )


def _differences(first: Result, second: Result) -> list[str]:
    """Differences of machine, target, profile and settings that may explain one in speed."""
    one, other = _circumstances(first), _circumstances(second)
    return [
        f"{name}: {one.get(name)} and {other.get(name)}"
        for name in one | other
        if one.get(name) != other.get(name)
    ]


def _circumstances(result: Result) -> dict[str, Any]:
    machine, profile = result.environment, result.profile
    return {
        "the machine": machine.device,
        "threads": machine.threads,
        "the target": result.target.name,
        "the target's architecture": result.target.hash,
        "the profile": "none" if profile is None else f"{profile.kind} {profile.sha256[:12]}",
        **{name: _setting(result, name) for name in (*WARNED, "repeats")},
        **{name: value for name, value in machine.fields.items() if name.endswith("_version")},
    }


def _setting(result: Result, name: str) -> Any:
    return getattr(result.settings, name)
