"""Decoders whose true speed is known, on a clock that only they move; and results by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lab.bench.arms.base import Details, Put
from lab.bench.prompts import Encoded
from lab.bench.record import Arm, Result
from lab.bench.schedule import Schedule, Tools, run_schedule
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
    """Gives `tokens_a_round` of the prompt's text in every `round_s`, after `prefill_s`.

    text         the whole text of a prompt; it goes on behind the end token
    stubborn     goes on, and takes its time, when told that no more is wanted
    first        tokens that come with the prefill
    slowness     factor of all times by call, to make a noisy machine
    weather      factor of a round's time by the clock, for one that is noisy meanwhile
    stepped      whether it can wait behind a round
    """

    arm: Arm
    clock: Clock
    text: Callable[[Sequence[int]], list[int]]
    round_s: float = 0.01
    tokens_a_round: int = 1
    prefill_s: float = 0.05
    first: int = 1
    stubborn: bool = False
    slowness: Callable[[int], float] = lambda call: 1.0
    weather: Callable[[float], float] = lambda now_s: 1.0
    stepped: bool = False
    largest_tree: int = 1
    calls: list[tuple[tuple[int, ...], int, int]] = field(default_factory=list)
    prepared: list[int] = field(default_factory=list)

    def prepare(self, tokens: int) -> None:
        self.prepared.append(tokens)

    def start(self, ids: Sequence[int], new_tokens: int, seed: int) -> FakeDecoding:
        self.calls.append((tuple(ids), new_tokens, seed))
        kind = FakeSteppedDecoding if self.stepped else FakeDecoding
        return kind(self, self.text(ids), self.slowness(len(self.calls)))


class FakeDecoding:
    def __init__(self, runner: FakeArm, text: list[int], slowness: float) -> None:
        self.runner, self.text, self.slowness = runner, text, slowness

    def run(self, put: Put) -> None:
        for _ in self._rounds(put):
            pass

    def _rounds(self, put: Put) -> Iterator[None]:
        own = self.runner
        own.clock.now_s += own.prefill_s * self.slowness
        wanted = put(self.text[: own.first])
        at = own.first
        while (wanted or own.stubborn) and at < len(self.text):
            yield
            own.clock.now_s += own.round_s * self.slowness * own.weather(own.clock.now_s)
            wanted = put(self.text[at : at + own.tokens_a_round])
            at += own.tokens_a_round

    def details(self) -> Details:
        return Details()


class FakeSteppedDecoding(FakeDecoding):
    """One that waits behind each round."""

    def steps(self, put: Put) -> Iterator[None]:
        yield from self._rounds(put)


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
    outcome = run_schedule(own, plan, Tools(clock=own[0].clock))
    usual = {"settings": settings(new_tokens=plan.new_tokens, repeats=plan.repeats)}
    usual["failed"] = outcome.failed
    lost = {one.name for one in outcome.failed}
    arms = [one.arm for one in own if one.arm.name not in lost]
    prompts = [one.prompt for one in plan.prompts]
    return result(arms, prompts, outcome.responses, **usual | changed)
