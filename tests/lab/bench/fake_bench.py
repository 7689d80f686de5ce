"""Decoders whose true speed is known, on a clock that only they move; and results by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lab.bench.arms.base import ArmDecoding, Put
from lab.bench.prompts import Encoded
from lab.bench.record import Arm, Result
from lab.bench.schedule import Schedule, run_schedule
from tests.lab.bench.made_bench import prompt, result, settings

END = 9


class Clock:
    """Seconds that pass only where a fake decoder says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class FakeArm:
    """Gives a token after `prefill_s`, and `tokens_a_round` in every `round_s`.

    text         the whole text of a prompt; it goes on behind the end token
    stubborn     goes on, and takes its time, when told that no more is wanted
    stepped      whether it can wait behind a round
    """

    arm: Arm
    clock: Clock
    text: Callable[[Sequence[int]], list[int]]
    round_s: float = 0.01
    tokens_a_round: int = 1
    prefill_s: float = 0.05
    stubborn: bool = False
    stepped: bool = False
    largest_tree: int = 1

    def prepare(self, tokens: int) -> None: ...

    def start(self, ids: Sequence[int], new_tokens: int, seed: int) -> FakeDecoding:
        return FakeDecoding(self, self.text(ids))


class FakeDecoding(ArmDecoding):
    def __init__(self, runner: FakeArm, text: list[int]) -> None:
        self.runner, self.text, self.pauses = runner, text, runner.stepped

    def steps(self, put: Put) -> Iterator[None]:
        own = self.runner
        own.clock.now_s += own.prefill_s
        wanted, at = put(self.text[:1]), 1
        while (wanted or own.stubborn) and at < len(self.text):
            yield
            own.clock.now_s += own.round_s
            wanted = put(self.text[at : at + own.tokens_a_round])
            at += own.tokens_a_round


def encoded(name: str, ids: Sequence[int], prompt_set: str = "set") -> Encoded:
    return Encoded(prompt=prompt(name, prompt_set, len(ids)), ids=tuple(ids))


def endless(ids: Sequence[int]) -> list[int]:
    return [1, 2, 3, 4] * 20


def schedule(prompts: int = 2, **changed: Any) -> Schedule:
    """Prompts of one token, two, ..., and up to 21 new ones."""
    texts = [encoded(f"p{i}", [5] * (i + 1)) for i in range(prompts)]
    usual = {"prompts": texts, "new_tokens": 21, "repeats": 1, "ends": frozenset([END])}
    return Schedule(**usual | changed)


def run(own: Sequence[FakeArm], plan: Schedule, **changed: Any) -> Result:
    """All responses of a schedule, on the first runner's clock, as a result."""
    responses, failed = run_schedule(own, replace(plan, clock=own[0].clock))
    usual = {"settings": settings(new_tokens=plan.new_tokens, repeats=plan.repeats)}
    usual["failed"] = failed
    lost = {one.name for one in failed}
    arms = [one.arm for one in own if one.arm.name not in lost]
    prompts = [one.prompt for one in plan.prompts]
    return result(arms, prompts, responses, **usual | changed)
