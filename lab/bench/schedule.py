"""The order in which all arms decode all prompts, and the run that follows it.

A run that is interrupted begins anew: arms that were decoded at different times cannot be compared.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from time import perf_counter

from costmodel.errors import MeasurementError
from lab.bench.arms.base import ArmDecoding, ArmRunner, PeerFailure
from lab.bench.prompts import Encoded
from lab.bench.record import FailedArm, Finish, Response, Update
from profiler.measure.samples import in_turn

WARM_UP_TOKENS = 32


# Gets the number of responses so far, and of all.
Listener = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One response to be made, and its place in the run."""

    place: int
    runner: ArmRunner
    encoded: Encoded
    repeat: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Prompts, repeats and limits of a run, and the order of its responses.

    ends      token ids that end a text
    seed      of sampling; each prompt and repeat has its own, the same for every arm
    by_round  arms that can pause between rounds decode a prompt together, a round each in turn
    limit_s   least seconds of a text by prompt and new tokens; None where it is not known
    """

    prompts: Sequence[Encoded]
    new_tokens: int
    repeats: int
    ends: frozenset[int]
    seed: int = 0
    by_round: bool = False
    clock: Callable[[], float] = perf_counter
    limit_s: Callable[[int, int], float | None] = lambda prompt_tokens, new_tokens: None

    def turns(self, runners: Sequence[ArmRunner]) -> Iterator[list[Turn]]:
        """Each prompt by all arms in a row; the first arm changes from prompt to prompt.

        A slow drift, as of temperature or another program, then affects all arms alike.
        """
        for first, (repeat, encoded) in enumerate(product(range(self.repeats), self.prompts)):
            order = [runners[(first + k) % len(runners)] for k in range(len(runners))]
            yield [
                Turn(first * len(runners) + k, runner, encoded, repeat, self.seed + first)
                for k, runner in enumerate(order)
            ]


def run_schedule(
    runners: Sequence[ArmRunner], schedule: Schedule, listener: Listener = lambda done, of: None
) -> tuple[tuple[Response, ...], tuple[FailedArm, ...]]:
    """All responses in the order of the schedule, and the arms of engines that failed.

    An arm whose engine fails is left out from there on, with its responses. Raises
    MeasurementError naming arm and prompt where a decoder stops before its end.
    """
    run = _Run(schedule, {})
    run.warm_up(runners)
    responses: list[Response] = []
    for turns in schedule.turns(runners):
        together = run.respond_together(turns) if schedule.by_round else {}
        for turn in turns:
            arm = turn.runner.arm.name
            if arm in run.failed:
                continue
            try:
                responses.append(together.get(turn) or run.respond(turn))
            except PeerFailure as failure:
                answered = sum(response.arm == arm for response in responses)
                run.fail(arm, failure, turn.encoded.prompt.id, answered)
                continue
            listener(len(responses), len(turns) * len(schedule.prompts) * schedule.repeats)
    return tuple(one for one in responses if one.arm not in run.failed), tuple(run.failed.values())


@dataclass(frozen=True, slots=True)
class _Run:
    """A schedule, and the arms that failed under it."""

    schedule: Schedule
    failed: dict[str, FailedArm]

    def fail(
        self, arm: str, failure: PeerFailure, prompt: str | None = None, answered: int = 0
    ) -> None:
        """Leave an arm out from here on."""
        self.failed[arm] = FailedArm(
            name=arm, prompt=prompt, answered=answered, reason=failure.problem
        )

    def warm_up(self, runners: Sequence[ArmRunner]) -> None:
        """Set every arm up for the longest prompt, and decode the beginning of its text."""
        schedule = self.schedule
        longest = max(schedule.prompts, key=lambda encoded: len(encoded.ids))
        largest = max(runner.largest_tree for runner in runners)
        tokens = len(longest.ids) + schedule.new_tokens + largest + 2
        steps = (lambda runner: runner.prepare(tokens), partial(self._rehearse, encoded=longest))
        for step, runner in product(steps, runners):
            if runner.arm.name not in self.failed:
                try:
                    step(runner)
                except PeerFailure as failure:
                    self.fail(runner.arm.name, failure)

    def _rehearse(self, runner: ArmRunner, encoded: Encoded) -> None:
        """Decode the beginning of a text that does not count."""
        timer = ResponseTimer(self.schedule, WARM_UP_TOKENS)
        decoding = runner.start(encoded.ids, timer.new_tokens, self.schedule.seed)
        for _ in _rounds(runner, encoded, timer, decoding):
            pass
        decoding.rehearse()

    def respond(self, turn: Turn) -> Response:
        """One response, decoded without interruption. Raises PeerFailure."""
        timer = ResponseTimer(self.schedule)
        gc.collect()  # garbage of earlier arms is not collected in this one's time
        decoding = self._start(turn)
        for _ in _rounds(turn.runner, turn.encoded, timer, decoding):
            pass
        return self._response(turn, timer, decoding)

    def respond_together(self, turns: Sequence[Turn]) -> dict[Turn, Response]:
        """The turns of one prompt whose arms can pause, a round each in turn."""
        started = {turn: decoding for turn in turns if (decoding := self._start(turn)).pauses}
        timers = {turn: ResponseTimer(self.schedule) for turn in started}
        gc.collect()
        rounds = {
            turn: _rounds(turn.runner, turn.encoded, timers[turn], decoding)
            for turn, decoding in started.items()
        }
        for _ in in_turn(rounds):
            pass
        return {turn: self._response(turn, timers[turn], one) for turn, one in started.items()}

    def _start(self, turn: Turn) -> ArmDecoding:
        return turn.runner.start(turn.encoded.ids, self.schedule.new_tokens, turn.seed)

    def _response(self, turn: Turn, timer: ResponseTimer, decoding: ArmDecoding) -> Response:
        update, details = timer.update(decoding), decoding.details()
        return Response(
            arm=turn.runner.arm.name,
            prompt=turn.encoded.prompt.id,
            repeat=turn.repeat,
            place=turn.place,
            tokens=(details.text or tuple(timer.tokens))[: len(timer.tokens)],
            finish=timer.finish or "length",
            first_token_s=timer.first_token_s,
            total_s=timer.total_s,
            limit_s=self.schedule.limit_s(len(turn.encoded.ids), len(timer.tokens)),
            first_tokens=timer.first_tokens,
            stages=details.stages,
            rounds=details.rounds,
            update=update,
            warnings=details.warnings,
        )


def _rounds(
    runner: ArmRunner, encoded: Encoded, timer: ResponseTimer, decoding: ArmDecoding
) -> Iterator[None]:
    """Timed rounds; arm and prompt stand before the message of a MeasurementError.

    A PeerFailure passes.
    """
    try:
        yield from timer.time(decoding)
    except PeerFailure:
        raise
    except MeasurementError as error:
        raise MeasurementError(
            f"{runner.arm.name}, prompt '{encoded.prompt.id}': {error.problem}"
        ) from error


_DIGITS = 7  # of seconds; the clock's noise is larger


class ResponseTimer:
    """Takes the tokens of one text, and times the first and the last that count.

    A text ends with the first end token, which counts, or after `new_tokens`. Later tokens do
    not count, nor does time after the last one that does.
    """

    def __init__(self, schedule: Schedule, most_tokens: int | None = None) -> None:
        """most_tokens  of a text that is shorter than the schedule's"""
        self.new_tokens = min(schedule.new_tokens, most_tokens or schedule.new_tokens)
        self.tokens: list[int] = []
        self.first_tokens = 0
        self.finish: Finish | None = None
        self._clock, self._ends = schedule.clock, schedule.ends
        self._start_s = self._first_s = self._last_s = 0.0
        self._paused_s = 0.0  # between rounds, while other arms decoded

    @property
    def first_token_s(self) -> float:
        return round(self._first_s - self._start_s, _DIGITS)

    @property
    def total_s(self) -> float:
        return round(self._last_s - self._start_s, _DIGITS)

    def time(self, decoding: ArmDecoding) -> Iterator[None]:
        """Run the decoding one round at each `next`; the time between rounds does not count.

        Raises MeasurementError where it stops early.
        """
        self._start_s = self._clock()
        for _ in decoding.steps(self.put):
            pause_s = self._clock()
            yield
            self._paused_s += self._clock() - pause_s
        if self.finish is None:
            raise MeasurementError(
                f"the text ended after {len(self.tokens)} of {self.new_tokens} tokens without an"
                " end token"
            )

    def update(self, decoding: ArmDecoding) -> Update | None:
        """Let the arm update its drafter, timed; None where its drafter does not learn."""
        start_s = self._clock()
        update = decoding.update()
        spent_s = round(self._clock() - start_s, _DIGITS)
        return None if update is None else replace(update, seconds=spent_s)

    def put(self, tokens: Sequence[int]) -> bool:
        """Take new tokens; false once the text has ended."""
        if self.finish is not None or not tokens:
            return self.finish is None
        now_s, first = self._clock() - self._paused_s, not self.tokens
        for token in tokens:
            self.tokens.append(token)
            if token in self._ends:
                self.finish = "eos"
            elif len(self.tokens) == self.new_tokens:
                self.finish = "length"
            if self.finish is not None:
                break
        self._last_s = now_s
        if first:
            self._first_s, self.first_tokens = now_s, len(self.tokens)
        return self.finish is None
