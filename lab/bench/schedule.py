"""The order in which all arms decode all prompts, and the run that follows it.

A run that is interrupted begins anew: arms that were decoded at different times cannot be compared.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from time import perf_counter

from costmodel.errors import MeasurementError
from lab.bench.arms.base import (
    ArmDecoding,
    ArmRunner,
    PeerFailure,
    SteppedArmDecoding,
    UpdatingArmDecoding,
)
from lab.bench.prompts import Encoded
from lab.bench.record import FailedArm, Finish, Response, Update
from profiler.measure.samples import in_turn

WARM_UP_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Prompts, repeats and limits of a run, and the order of its responses.

    ends      token ids that end a text
    seed      of sampling; each prompt and repeat has its own, the same for every arm
    by_round  arms that can pause between rounds decode a prompt together, a round each in turn
    """

    prompts: Sequence[Encoded]
    new_tokens: int
    repeats: int
    ends: frozenset[int]
    seed: int = 0
    by_round: bool = False

    def turns(self, arms: int) -> Iterator[Turn]:
        """Each prompt by all arms in a row; the first arm changes from prompt to prompt.

        A slow drift, as of temperature or another program, then affects all arms alike.
        """
        place = 0
        for repeat in range(self.repeats):
            for index in range(len(self.prompts)):
                first = repeat * len(self.prompts) + index
                for offset in range(arms):
                    yield Turn(place, (first + offset) % arms, index, repeat)
                    place += 1

    def seed_of(self, turn: Turn) -> int:
        return self.seed + turn.repeat * len(self.prompts) + turn.prompt


@dataclass(frozen=True, slots=True)
class Turn:
    """One response to be made: its place in the run, and the indices of arm, prompt and repeat."""

    place: int
    arm: int
    prompt: int
    repeat: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """The clock and the bandwidth limit of a run; tests replace them."""

    clock: Callable[[], float] = perf_counter
    limit_s: Callable[[int, int], float | None] = lambda prompt_tokens, new_tokens: None


# Gets the number of responses so far, and of all.
Listener = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The responses of a run in order, without those of the arms of engines that failed."""

    responses: tuple[Response, ...]
    failed: tuple[FailedArm, ...] = ()


def run_schedule(
    runners: Sequence[ArmRunner],
    schedule: Schedule,
    tools: Tools,
    listener: Listener = lambda done, of: None,
) -> Outcome:
    """All responses in the order of the schedule.

    An arm whose engine fails is left out from there on. Raises MeasurementError naming arm and
    prompt where a decoder stops before its end.
    """
    run = _Run(runners, schedule, tools, {})
    turns = list(schedule.turns(len(runners)))
    run.warm_up()
    responses: list[Response] = []
    together: dict[Turn, Response] = {}
    for turn in turns:
        if schedule.by_round and turn.place % len(runners) == 0:
            together = run.respond_together(turns[turn.place : turn.place + len(runners)])
        arm = runners[turn.arm].arm.name
        if arm in run.failed:
            continue
        try:
            responses.append(together.get(turn) or run.respond(turn))
        except PeerFailure as failure:
            prompt = schedule.prompts[turn.prompt].prompt.id
            answered = sum(response.arm == arm for response in responses)
            run.fail(arm, failure, prompt=prompt, answered=answered)
            continue
        listener(len(responses), len(turns))
    return Outcome(
        responses=tuple(one for one in responses if one.arm not in run.failed),
        failed=tuple(run.failed.values()),
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """The arms of a run with its schedule and tools, and those that failed."""

    runners: Sequence[ArmRunner]
    schedule: Schedule
    tools: Tools
    failed: dict[str, FailedArm]

    def warm_up(self) -> None:
        """Set every arm up for the longest prompt, and decode the beginning of its text."""
        schedule = self.schedule
        longest = max(schedule.prompts, key=lambda encoded: len(encoded.ids))
        largest = max(runner.largest_tree for runner in self.runners)
        tokens = len(longest.ids) + schedule.new_tokens + largest + 2
        steps = (lambda runner: runner.prepare(tokens), partial(self._rehearse, encoded=longest))
        for step, runner in product(steps, self.runners):
            if runner.arm.name not in self.failed:
                try:
                    step(runner)
                except PeerFailure as failure:
                    self.fail(runner.arm.name, failure, prompt=None, answered=0)

    def fail(self, arm: str, failure: PeerFailure, *, prompt: str | None, answered: int) -> None:
        """Leave an arm out from here on."""
        self.failed[arm] = FailedArm(
            name=arm, prompt=prompt, answered=answered, reason=failure.problem
        )

    def _rehearse(self, runner: ArmRunner, encoded: Encoded) -> None:
        """Decode the beginning of a text that does not count."""
        schedule = self.schedule
        new_tokens = min(schedule.new_tokens, WARM_UP_TOKENS)
        timer = ResponseTimer(self.tools.clock, new_tokens, schedule.ends)
        decoding = runner.start(encoded.ids, new_tokens, schedule.seed)
        with _naming(runner, encoded):
            timer.time(decoding)
        if isinstance(decoding, UpdatingArmDecoding):
            decoding.rehearse()

    def respond(self, turn: Turn) -> Response:
        """One response, decoded without interruption. Raises PeerFailure."""
        timer = self._timer()
        gc.collect()  # garbage of earlier arms is not collected in this one's time
        decoding = self._start(turn)
        with _naming(self._runner(turn), self._encoded(turn)):
            timer.time(decoding)
        return self._response(turn, timer, decoding)

    def respond_together(self, turns: Sequence[Turn]) -> dict[Turn, Response]:
        """The turns of one prompt whose arms can pause, a round each in turn."""
        started: dict[Turn, tuple[ResponseTimer, SteppedArmDecoding]] = {}
        for turn in turns:
            decoding = self._start(turn)
            if isinstance(decoding, SteppedArmDecoding):
                started[turn] = self._timer(), decoding
        gc.collect()
        rounds = {turn: self._timed_rounds(turn, *pair) for turn, pair in started.items()}
        for _ in in_turn(rounds):
            pass
        return {turn: self._response(turn, *pair) for turn, pair in started.items()}

    def _timed_rounds(
        self, turn: Turn, timer: ResponseTimer, decoding: SteppedArmDecoding
    ) -> Iterator[None]:
        with _naming(self._runner(turn), self._encoded(turn)):
            yield from timer.time_steps(decoding)

    def _response(self, turn: Turn, timer: ResponseTimer, decoding: ArmDecoding) -> Response:
        update, encoded = timer.update(decoding), self._encoded(turn)
        details = decoding.details()
        return Response(
            arm=self._runner(turn).arm.name,
            prompt=encoded.prompt.id,
            repeat=turn.repeat,
            place=turn.place,
            tokens=(details.text or tuple(timer.tokens))[: len(timer.tokens)],
            finish=timer.finish or "length",
            first_token_s=timer.first_token_s,
            total_s=timer.total_s,
            limit_s=self.tools.limit_s(len(encoded.ids), len(timer.tokens)),
            first_tokens=timer.first_tokens,
            stages=details.stages,
            rounds=details.rounds,
            update=update,
            warnings=details.warnings,
        )

    def _start(self, turn: Turn) -> ArmDecoding:
        ids, seed = self._encoded(turn).ids, self.schedule.seed_of(turn)
        return self._runner(turn).start(ids, self.schedule.new_tokens, seed)

    def _timer(self) -> ResponseTimer:
        return ResponseTimer(self.tools.clock, self.schedule.new_tokens, self.schedule.ends)

    def _runner(self, turn: Turn) -> ArmRunner:
        return self.runners[turn.arm]

    def _encoded(self, turn: Turn) -> Encoded:
        return self.schedule.prompts[turn.prompt]


@contextmanager
def _naming(runner: ArmRunner, encoded: Encoded) -> Iterator[None]:
    """Put arm and prompt before the message of a MeasurementError; a PeerFailure passes."""
    try:
        yield
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

    def __init__(self, clock: Callable[[], float], new_tokens: int, ends: frozenset[int]) -> None:
        self.tokens: list[int] = []
        self.first_tokens = 0
        self.finish: Finish | None = None
        self._clock, self._new_tokens, self._ends = clock, new_tokens, ends
        self._start_s = self._first_s = self._last_s = 0.0
        self._paused_s = 0.0  # between rounds, while other arms decoded

    @property
    def first_token_s(self) -> float:
        return round(self._first_s - self._start_s, _DIGITS)

    @property
    def total_s(self) -> float:
        return round(self._last_s - self._start_s, _DIGITS)

    def time(self, decoding: ArmDecoding) -> None:
        """Run the decoding to its end. Raises MeasurementError where it stops early."""
        self._start_s = self._clock()
        decoding.run(self.put)
        self._check_ended()

    def time_steps(self, decoding: SteppedArmDecoding) -> Iterator[None]:
        """Run the decoding one round at each `next`; the time between rounds does not count."""
        self._start_s = self._clock()
        for _ in decoding.steps(self.put):
            pause_s = self._clock()
            yield
            self._paused_s += self._clock() - pause_s
        self._check_ended()

    def _check_ended(self) -> None:
        if self.finish is None:
            raise MeasurementError(
                f"the text ended after {len(self.tokens)} of {self._new_tokens} tokens without an"
                " end token"
            )

    def update(self, decoding: ArmDecoding) -> Update | None:
        """Let the arm update its drafter, timed; None where its drafter does not learn."""
        if not isinstance(decoding, UpdatingArmDecoding):
            return None
        start_s = self._clock()
        update = decoding.update()
        return replace(update, seconds=round(self._clock() - start_s, _DIGITS))

    def put(self, tokens: Sequence[int]) -> bool:
        """Take new tokens; false once the text has ended."""
        if self.finish is not None or not tokens:
            return self.finish is None
        now_s, first = self._clock() - self._paused_s, not self.tokens
        for token in tokens:
            self.tokens.append(token)
            if token in self._ends:
                self.finish = "eos"
            elif len(self.tokens) == self._new_tokens:
                self.finish = "length"
            if self.finish is not None:
                break
        self._last_s = now_s
        if first:
            self._first_s, self.first_tokens = now_s, len(self.tokens)
        return self.finish is None
