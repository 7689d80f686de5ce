"""Every arm over the same prompts, turn by turn, kept in a journal as it goes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from costmodel.errors import InputError, MeasurementError
from profiler.bench.contender import (
    Contender,
    Decoding,
    SteppedDecoding,
    UpdatingDecoding,
)
from profiler.bench.prompts import Encoded
from profiler.bench.record import Environment, Response
from profiler.bench.stopwatch import Clock, MemoryGauge, NoGauge, Stopwatch
from profiler.bench.store import environment_from, response_from
from profiler.journal import FRESH_HINT, Journal
from profiler.turns import in_turn

WARM_UP_TOKENS = 32
LOST = (
    "{arm}: what its drafter had learnt was lost when the run was interrupted, so that it decoded "
    "the texts before that again, not in turn with the other arms; --fresh runs all in turn"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What is decoded, in which order.

    ends      token ids that end a text
    seed      of sampling; each prompt and repeat has its own, the same for every arm
    by_round  arms that can wait behind each round decode a prompt together, round by round
    """

    prompts: Sequence[Encoded]
    new_tokens: int
    repeats: int
    ends: frozenset[int]
    seed: int = 0
    by_round: bool = False

    def turns(self, arms: int) -> Iterator[Turn]:
        """Every prompt by all arms in a row, beginning with the next arm each time.

        What drifts slowly, as heat or another program, so meets all arms alike.
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
    """One response to be made: numbers of its place, arm, prompt and repeat."""

    place: int
    arm: int
    prompt: int
    repeat: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What a run measures with; replaced by made-up ones in tests."""

    clock: Clock = perf_counter
    memory: MemoryGauge = field(default_factory=NoGauge)
    limit_s: Callable[[int, int], float | None] = lambda prompt_tokens, new_tokens: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is, and the response just made; None for one of an earlier run."""

    done: int
    of: int
    response: Response | None = None


Listener = Callable[[Progress], None]


def run_schedule(
    contenders: Sequence[Contender],
    schedule: Schedule,
    journal: Journal | None,
    tools: Tools,
    listener: Listener = lambda progress: None,
) -> tuple[Response, ...]:
    """All responses in the order of the schedule; those in the journal are not made again.

    But for an arm whose drafter is updated: it begins anew unless it had come to its end.
    Raises MeasurementError naming arm and prompt where a decoder stops before its end.
    """
    known = _known(journal)
    turns = list(schedule.turns(len(contenders)))
    lost = _lost(contenders, schedule, turns, known)
    done = {key: response for key, response in known.items() if key[0] not in lost}
    if any(_key(contenders, schedule, turn) not in done for turn in turns):
        warm_up(contenders, schedule, tools.clock)
    responses: list[Response] = []
    together: dict[Turn, Response] = {}
    for turn in turns:
        key = _key(contenders, schedule, turn)
        response = done.get(key)
        made = response is None
        if schedule.by_round and turn.place % len(contenders) == 0:
            group = turns[turn.place : turn.place + len(contenders)]
            missing = [one for one in group if _key(contenders, schedule, one) not in done]
            together = _respond_together(contenders, schedule, missing, tools)
        if response is None:
            response = together.get(turn) or _respond(contenders[turn.arm], schedule, turn, tools)
            if key in known:
                again = LOST.format(arm=response.arm)
                response = replace(response, warnings=(*response.warnings, again))
            if journal is not None:
                journal.append({"response": asdict(response)})
        responses.append(response)
        listener(Progress(done=len(responses), of=len(turns), response=response if made else None))
    return tuple(responses)


def warm_up(contenders: Sequence[Contender], schedule: Schedule, clock: Clock) -> None:
    """Set every arm up for the longest text, and let it write the beginning of that one."""
    longest = max(schedule.prompts, key=lambda encoded: len(encoded.ids))
    largest = max(contender.largest_tree for contender in contenders)
    tokens = len(longest.ids) + schedule.new_tokens + largest + 2
    for contender in contenders:
        contender.prepare(tokens)
    new_tokens = min(schedule.new_tokens, WARM_UP_TOKENS)
    for contender in contenders:
        watch = Stopwatch(clock, new_tokens, schedule.ends)
        decoding = _time(watch, contender, longest, new_tokens, schedule.seed)
        if isinstance(decoding, UpdatingDecoding):
            decoding.rehearse()


def open_journal(path: Path, header: Mapping[str, Any], *, fresh: bool) -> Journal:
    """The journal beside a result. Raises InputError where it is of another run."""
    return Journal(path.with_name(path.name + ".journal"), header, fresh=fresh)


def recorded_environment(journal: Journal, found: Environment) -> Environment:
    """The environment that the run began in: the journal's, or `found`, which it then keeps."""
    for record in journal.records:
        if "environment" in record:
            return environment_from(record["environment"])
    journal.append({"environment": asdict(found)})
    return found


def _known(journal: Journal | None) -> dict[tuple[str, str, int], Response]:
    known = {}
    for number, record in enumerate(() if journal is None else journal.records, 2):
        if "response" not in record:
            continue
        try:
            response = response_from(record["response"])
        except InputError as error:
            raise InputError(
                f"{journal.path if journal else ''}, line {number}: {error.problem}",
                hint=FRESH_HINT,
            ) from None
        known[response.key] = response
    return known


def _lost(
    contenders: Sequence[Contender],
    schedule: Schedule,
    turns: Sequence[Turn],
    known: Mapping[tuple[str, str, int], Response],
) -> set[str]:
    """Arms whose drafter had learnt of some texts and not yet of all, which nothing brings back."""
    updated = {one.arm.name for one in contenders if one.arm.updates}
    missing = {key[0] for turn in turns if (key := _key(contenders, schedule, turn)) not in known}
    return updated & missing


def _key(contenders: Sequence[Contender], schedule: Schedule, turn: Turn) -> tuple[str, str, int]:
    return contenders[turn.arm].arm.name, schedule.prompts[turn.prompt].prompt.id, turn.repeat


def _respond(contender: Contender, schedule: Schedule, turn: Turn, tools: Tools) -> Response:
    encoded = schedule.prompts[turn.prompt]
    watch = Stopwatch(tools.clock, schedule.new_tokens, schedule.ends)
    gc.collect()  # what the arms before have left is not cleared away in this one's time
    tools.memory.start()
    decoding = _time(watch, contender, encoded, schedule.new_tokens, schedule.seed_of(turn))
    update = watch.update(decoding)
    peak_bytes = tools.memory.peak_bytes()
    response = _response(contender, schedule, turn, (watch, decoding), tools)
    return replace(response, update=update, peak_memory_bytes=peak_bytes)


def _respond_together(
    contenders: Sequence[Contender], schedule: Schedule, turns: Sequence[Turn], tools: Tools
) -> dict[Turn, Response]:
    """The turns of one prompt whose arms can wait, a round each; memory is nobody's own."""
    begun: dict[Turn, tuple[Stopwatch, SteppedDecoding]] = {}
    for turn in turns:
        encoded, seed = schedule.prompts[turn.prompt], schedule.seed_of(turn)
        decoding = contenders[turn.arm].start(encoded.ids, schedule.new_tokens, seed)
        if isinstance(decoding, SteppedDecoding):
            watch = Stopwatch(tools.clock, schedule.new_tokens, schedule.ends)
            begun[turn] = watch, decoding
    gc.collect()
    going = {
        turn: _time_steps(watch, decoding, contenders[turn.arm], schedule.prompts[turn.prompt])
        for turn, (watch, decoding) in begun.items()
    }
    for _ in in_turn(going):
        pass
    responses = {}
    for turn, (watch, decoding) in begun.items():
        update = watch.update(decoding)
        found = _response(contenders[turn.arm], schedule, turn, (watch, decoding), tools)
        responses[turn] = replace(found, update=update)
    return responses


def _response(
    contender: Contender,
    schedule: Schedule,
    turn: Turn,
    timed: tuple[Stopwatch, Decoding],
    tools: Tools,
) -> Response:
    encoded, (watch, decoding) = schedule.prompts[turn.prompt], timed
    details = decoding.details()
    return Response(
        arm=contender.arm.name,
        prompt=encoded.prompt.id,
        repeat=turn.repeat,
        place=turn.place,
        tokens=tuple(watch.tokens),
        finish=watch.finish or "length",
        first_token_s=watch.first_token_s,
        total_s=watch.total_s,
        limit_s=tools.limit_s(len(encoded.ids), len(watch.tokens)),
        first_tokens=watch.first_tokens,
        stages=details.stages,
        rounds=details.rounds,
        warnings=details.warnings,
    )


def _time(
    watch: Stopwatch, contender: Contender, encoded: Encoded, new_tokens: int, seed: int
) -> Decoding:
    decoding = contender.start(encoded.ids, new_tokens, seed)
    with _naming(contender, encoded):
        watch.time(decoding)
    return decoding


def _time_steps(
    watch: Stopwatch, decoding: SteppedDecoding, contender: Contender, encoded: Encoded
) -> Iterator[None]:
    with _naming(contender, encoded):
        yield from watch.time_steps(decoding)


@contextmanager
def _naming(contender: Contender, encoded: Encoded) -> Iterator[None]:
    """Say in an error of measuring which arm and prompt it was."""
    try:
        yield
    except MeasurementError as error:
        raise MeasurementError(
            f"{contender.arm.name}, prompt '{encoded.prompt.id}': {error.problem}"
        ) from error
