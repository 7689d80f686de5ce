"""The loop that measures the points of a calibration.

Each pass takes one sample of every unfinished point, in a new random order, so that a drift of
the machine does not look like a trend. Points that were added together get a few samples at
first, and the rest when all points are mixed: a disturbance of some seconds would otherwise
dominate them. Every sample is in the journal before the next one is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from costmodel.errors import MeasurementError
from profiler.measure.instruments import Instruments, take_sample
from profiler.measure.journal import Journal
from profiler.measure.samples import PointAccumulator, PointSamples, paces

FIRST_SAMPLES = 2  # of the first points, which say what is worth measuring
SAMPLES_A_ROUND = 3  # of every further point
CHOSEN = ("verify", "held_out")  # what an adaptive sweep times again, by what is in doubt
PACED = (*CHOSEN, "plain", "prefill", "draft")  # forwards, which a busy machine slows
LEAST_SAMPLED = 0.5  # of the time, that is left for samples after slow first calls
TOLD_REJECTED = 5  # samples in a row
MIN_GRID_SHARE = 0.75  # with fewer points measured, a profile would have hidden gaps


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Task:
    """One call to time.

    kind     `verify`, `held_out`, `plain` (a step of one row that the surface does not use),
             `prefill`, `draft`, `build`, `accept`, `accept_sampled` or `commit`
    size     rows of a forward, tokens of a prefill or commit, nodes of a build or accept
    context  cached tokens (0 where the kind has none)
    """

    kind: str
    size: int
    context: int = 0
    batch: int = 1

    def key(self) -> dict[str, Any]:
        return asdict(self)


class OutOfMemory(MeasurementError):
    """The memory did not suffice for a point, against the estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """Samples by task; those of forwards are corrected to the machine's typical pace.

    unmeasured   tasks without a sample when the budget was spent
    pace_spread  standard deviation of the logarithm of the pace
    skipped      tasks that did not fit into memory, with the reason
    """

    samples: dict[Task, PointSamples]
    unmeasured: tuple[Task, ...]
    spent_s: float
    resumed_samples: int
    damaged_lines: int = 0
    pace_spread: float = 0.0
    skipped: Mapping[Task, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepControl:
    """The time of a sweep, and callbacks that decide how it goes on.

    limit_s      the most time
    on_progress  called with the share of the time that is spent, and a few words
    more         further tasks, asked each time every point has a few samples; empty: no more
    again        tasks to time once more, asked until it gives none: the samples suffice. None: the
                 instruments' rule says of each task when they do; otherwise only of the stages
    on_state     called with what disturbs the samples, where one after another is rejected
    """

    limit_s: float
    on_progress: Callable[[float, str], None] = lambda share, state: None
    more: Callable[[SweepResult], Sequence[Task]] = lambda swept: ()
    again: Callable[[SweepResult], Sequence[Task]] | None = None
    on_state: Callable[[str], None] = lambda reason: None


class TimedCalls(Protocol):
    """Turns tasks into calls to time."""

    def call(self, task: Task) -> Callable[[], object]:
        """A function that runs the task once, from the same state each time."""

    def shortfall(self, task: Task) -> str:
        """The reason why the task cannot be run; empty where it can."""


def run_sweep(
    tasks: Sequence[Task],
    workload: TimedCalls,
    instruments: Instruments,
    journal: Journal,
    control: SweepControl,
) -> SweepResult:
    """Measure the tasks in mixed order until all are done and suffice, or the time is spent.

    Everything counts as time: first calls, choices of further points, and the samples of the
    journal. Raises MeasurementError when too few points of the grid were measured.
    """
    sweep = _Sweep(workload, instruments, journal, control)
    sweep.add(tasks)
    # At least half of the limit is for samples, however slow the first calls were.
    least_s = sweep.spent_s - sweep.recorded_s + LEAST_SAMPLED * control.limit_s
    sweep.limit_s = max(control.limit_s, least_s)
    in_time = sweep.measure(lambda: sweep.with_fewer(FIRST_SAMPLES, sweep.points))
    while in_time and (further := control.more(sweep.result())):
        sweep.add(further)
        in_time = sweep.measure(lambda: sweep.with_fewer(SAMPLES_A_ROUND, further))
    in_time = in_time and sweep.measure(sweep.unfinished)
    while in_time and control.again and (doubtful := control.again(sweep.result())):
        once = iter([[task for task in doubtful if task in sweep.points]])
        in_time = sweep.measure(partial(next, once, []))
    return sweep.result()


class _Sweep:
    def __init__(
        self,
        workload: TimedCalls,
        instruments: Instruments,
        journal: Journal,
        control: SweepControl,
    ) -> None:
        self._workload, self._instruments, self._journal = workload, instruments, journal
        self._control = control
        self._recorded, unreadable = _recorded(journal)
        self._damaged = journal.damaged + unreadable
        self._next_number = len(journal.records)  # of the next sample
        self.points: dict[Task, PointAccumulator] = {}
        self._calls: dict[Task, Callable[[], object]] = {}
        self._skipped: dict[Task, str] = {}
        self._random = np.random.default_rng(0)
        self._start_s = instruments.timer.now_s()
        self.recorded_s = 0.0
        self._resumed = 0
        self.limit_s = control.limit_s
        self._rejected_in_a_row = 0

    @property
    def spent_s(self) -> float:
        """Seconds since the sweep began, and those of samples from the journal."""
        return self.recorded_s + self._instruments.timer.now_s() - self._start_s

    def add(self, tasks: Sequence[Task]) -> None:
        """Add the tasks that fit, with their samples from the journal, and warm them up."""
        for task in tasks:
            reason = self._workload.shortfall(task)
            if reason:
                self._skipped[task] = reason
                continue
            point = self.points[task] = PointAccumulator(self._instruments.rule)
            recorded = self._recorded.get(task, [])
            for number, seconds, ok in recorded:
                point.add(seconds, ok, number)
                self.recorded_s += seconds
            self._resumed += len(recorded)
            self._calls[task] = self._workload.call(task)
        for task in [one for one in tasks if one in self.points and not self.points[one].done]:
            try:
                self._calls[task]()  # first calls compile, allocate and choose kernels
            except OutOfMemory as error:
                self._skip(task, error)

    def with_fewer(self, samples: int, tasks: Iterable[Task]) -> list[Task]:
        points = ((task, self.points[task]) for task in tasks if task in self.points)
        return [t for t, point in points if not point.done and len(point.accepted) < samples]

    def unfinished(self) -> list[Task]:
        """The tasks of which the rule has not enough; those that are asked for again are left."""
        again = CHOSEN if self._control.again else ()
        return [t for t, point in self.points.items() if not point.done and t.kind not in again]

    def measure(self, waiting: Callable[[], Sequence[Task]]) -> bool:
        """Take samples in passes of random order until none waits; False when the time is spent."""
        while tasks := waiting():
            for position in self._random.permutation(len(tasks)):
                self._take_sample(tasks[position])
                if self.spent_s >= self.limit_s:
                    return False
        return True

    def _take_sample(self, task: Task) -> None:
        try:
            seconds, disturbance = take_sample(self._calls[task], self._instruments)
        except OutOfMemory as error:
            self._skip(task, error)
            return
        record = {"seconds": seconds, "disturbance": disturbance}
        self._journal.append(task.key() | record)
        self.points[task].add(seconds, not disturbance, self._next_number)
        self._next_number += 1
        self._rejected_in_a_row = self._rejected_in_a_row + 1 if disturbance else 0
        if self._rejected_in_a_row == TOLD_REJECTED:
            self._control.on_state(disturbance)
        samples, spent_s = sum(len(one.accepted) for one in self.points.values()), self.spent_s
        left_s = max(self.limit_s - spent_s, 0.0)
        state = f"{len(self.points)} points, {samples} samples, at most {left_s:.0f} s left"
        self._control.on_progress(min(spent_s / self.limit_s, 1.0), state)

    def result(self) -> SweepResult:
        """The samples so far, at the machine's typical pace. Raises MeasurementError."""
        points = self.points.items()
        samples = {task: point.samples for task, point in points if point.accepted}
        planned = sum(task.kind == "verify" for task in self.points)
        measured = sum(task.kind == "verify" for task in samples)
        if measured < MIN_GRID_SHARE * planned:
            raise MeasurementError(
                f"only {measured} of {planned} verification points could be measured",
                hint="Stop other work on this machine, and run again with a larger --time-budget; "
                "the samples taken so far are kept.",
            )
        paced = [task for task in samples if task.kind in PACED]
        numbers = {task: self.points[task].numbers[-samples[task].n :] for task in paced}
        rows = sorted(
            (number, point, seconds)
            for point, task in enumerate(paced)
            for number, seconds in zip(numbers[task], samples[task].seconds, strict=True)
        )
        pace = paces([seconds for _, _, seconds in rows], [point for _, point, _ in rows])
        slowness = dict(zip((number for number, _, _ in rows), pace.tolist(), strict=True))
        for task in paced:
            timed = zip(numbers[task], samples[task].seconds, strict=True)
            at_pace = tuple(seconds / slowness[number] for number, seconds in timed)
            samples[task] = replace(samples[task], seconds=at_pace)
        return SweepResult(
            samples=samples,
            unmeasured=tuple(task for task in self.points if task not in samples),
            spent_s=self.spent_s,
            resumed_samples=self._resumed,
            damaged_lines=self._damaged,
            pace_spread=float(np.log(pace).std()) if len(pace) else 0.0,
            skipped=dict(self._skipped),
        )

    def _skip(self, task: Task, error: OutOfMemory) -> None:
        self._skipped[task] = error.problem
        self.points.pop(task)


def _recorded(journal: Journal) -> tuple[dict[Task, list[tuple[int, float, bool]]], int]:
    """The journal's samples by task: number, seconds, accepted or not; and how many are none."""
    recorded: dict[Task, list[tuple[int, float, bool]]] = {}
    unreadable = 0
    for number, record in enumerate(journal.records):
        try:
            task = Task(**{key: record[key] for key in ("kind", "size", "context", "batch")})
            seconds = float(record["seconds"])
            if not 0 < seconds < math.inf:
                raise ValueError
            recorded.setdefault(task, []).append((number, seconds, not record["disturbance"]))
        except (KeyError, TypeError, ValueError, OverflowError):
            unreadable += 1
    return recorded, unreadable
