"""The loop that measures points.

All points are mixed: each pass takes one sample of every unfinished point, in a
fresh random order, so that a drift of the machine does not look like a trend. Points that an
adaptive sweep adds together are first sampled within seconds of each other, so they get few
samples then, and the others when all points are mixed: a disturbance that lasts for seconds
would otherwise be most of what is known of them.
Every sample goes into the journal before the next is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from costmodel.errors import InputError, MeasurementError
from profiler.journal import Journal
from profiler.memory import OutOfMemory
from profiler.pace import paces
from profiler.parallel import FollowedJournal
from profiler.stopping import StoppingRule
from profiler.timing import Guard, PointAccumulator, Samples, Timer, interleave, take_sample
from profiler.workload import Task, Workload

SAMPLES_A_ROUND = 3  # of every point before an adaptive sweep asks for further ones
LEAST_SAMPLES = 6  # of every point of an adaptive sweep that needs no further ones
PACED = ("verify", "held_out", "plain", "prefill", "draft")  # forwards, which a busy machine slows
MIN_GRID_SHARE = 0.75  # a profile from less would have holes that nobody sees


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a sweep is: samples taken, points that are done, seconds spent and allowed."""

    points_done: int
    points: int
    spent_s: float
    budget_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """Samples by task, those of forwards as at the machine's typical pace (`profiler.pace`).

    pace_spread  standard deviation of the pace's logarithm
    unmeasured  tasks that the budget left without a sample
    skipped     tasks that did not fit into memory, and why
    """

    samples: dict[Task, Samples]
    unmeasured: tuple[Task, ...]
    spent_s: float
    resumed_samples: int
    pace_spread: float = 0.0
    skipped: Mapping[Task, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruments:
    """What times a sample, what tells that it was disturbed, and when a point is done."""

    timer: Timer
    guard: Guard
    rule: StoppingRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Steering:
    """How long a sweep may take, who is told of it, and what makes it adaptive.

    `more` is asked for further tasks each time every point has some samples. It answers
    with none when there are none left, after which the rest of the budget goes into more
    samples, or with None when nothing more is needed.
    """

    budget_s: float
    on_progress: Callable[[Progress], None] = lambda progress: None
    more: Callable[[SweepResult], Sequence[Task] | None] = lambda swept: ()


def run_sweep(
    tasks: Sequence[Task],
    workload: Workload,
    instruments: Instruments,
    journal: Journal | FollowedJournal,
    steering: Steering,
) -> SweepResult:
    """Measure the tasks in mixed order until all are done or the budget is spent.

    Samples already in the journal count, with the time that they took. Raises
    MeasurementError when too few points of the grid could be measured.
    """
    sweep = _Sweep(workload, instruments, journal, steering)
    sweep.add(tasks)
    while sweep.measure(SAMPLES_A_ROUND):
        further = steering.more(sweep.result())
        if further is None:
            sweep.measure(LEAST_SAMPLES)
            break
        if not further:
            sweep.measure(None)
            break
        sweep.add(further)
    return sweep.result()


class _Sweep:
    """The points of a sweep, and the seconds spent on them."""

    def __init__(
        self,
        workload: Workload,
        instruments: Instruments,
        journal: Journal | FollowedJournal,
        steering: Steering,
    ) -> None:
        self._workload, self._instruments, self._journal = workload, instruments, journal
        self._steering = steering
        self._recorded = _recorded(journal)
        self._number = len(journal.records)  # of the next sample
        self._points: dict[Task, PointAccumulator] = {}
        self._taken: dict[Task, list[int]] = {}  # the numbers of the samples that count
        self._calls: dict[Task, Callable[[], object]] = {}
        self._skipped: dict[Task, str] = {}
        self._random = np.random.default_rng(0)
        self._spent_s = 0.0
        self._resumed = 0

    def add(self, tasks: Sequence[Task]) -> None:
        """Take tasks in, with what the journal holds of them, and warm up what is to measure.

        Those that do not fit into memory are skipped, and why is kept.
        """
        for task in tasks:
            reason = self._workload.shortfall(task)
            if reason:
                self._skipped[task] = reason
                continue
            point = PointAccumulator(self._instruments.rule)
            self._points[task], self._taken[task] = point, []
            for number, seconds, ok in self._recorded.get(task, []):
                self._count(task, number, seconds, ok=ok)
                self._spent_s += seconds
            self._resumed += point.attempts
            self._calls[task] = self._workload.call(task)
        known = [task for task in tasks if task in self._points]
        self._warm_up([task for task in known if not self._points[task].done])

    def measure(self, samples: int | None) -> bool:
        """Measure until every point is done, or has so many samples; False: the budget is spent."""
        timer, guard = self._instruments.timer, self._instruments.guard
        start_s = timer.now_s() - self._spent_s
        for task in interleave(lambda: self._waiting(samples), self._random):
            try:
                sample = take_sample(self._calls[task], timer, guard)
            except OutOfMemory as error:
                self._skip(task, error)
                continue
            record = {"seconds": sample.seconds, "disturbance": sample.disturbance}
            self._journal.append(task.key() | record, durable=False)
            self._count(task, self._number, sample.seconds, ok=not sample.disturbance)
            self._number += 1
            self._spent_s = timer.now_s() - start_s
            self._tell()
            if self._spent_s >= self._steering.budget_s:
                return False
        return True

    def result(self) -> SweepResult:
        samples, unmeasured = _collect(self._points)
        samples, pace_spread = _at_typical_pace(samples, self._taken)
        return SweepResult(
            samples=samples,
            unmeasured=tuple(unmeasured),
            spent_s=self._spent_s,
            resumed_samples=self._resumed,
            pace_spread=pace_spread,
            skipped=dict(self._skipped),
        )

    def _count(self, task: Task, number: int, seconds: float, *, ok: bool) -> None:
        self._points[task].add(seconds, ok=ok)
        if ok:
            self._taken[task].append(number)

    def _warm_up(self, tasks: Sequence[Task]) -> None:
        """Once through everything: first calls compile, allocate and choose kernels.

        On a machine so slow or busy that this alone takes half the budget, the rest goes
        unwarmed; the first samples of a point are then cut by their own decline.
        """
        timer, start_s = self._instruments.timer, self._instruments.timer.now_s()
        for task in tasks:
            try:
                self._calls[task]()
            except OutOfMemory as error:
                self._skip(task, error)
            if timer.now_s() - start_s > self._steering.budget_s / 2:
                return

    def _skip(self, task: Task, error: OutOfMemory) -> None:
        self._skipped[task] = error.problem
        self._points.pop(task)

    def _waiting(self, samples: int | None) -> list[Task]:
        return [
            task
            for task, point in self._points.items()
            if not point.done and (samples is None or point.attempts < samples)
        ]

    def _tell(self) -> None:
        self._steering.on_progress(
            Progress(
                points_done=sum(point.done for point in self._points.values()),
                points=len(self._points),
                spent_s=self._spent_s,
                budget_s=self._steering.budget_s,
            )
        )


def _recorded(
    journal: Journal | FollowedJournal,
) -> dict[Task, list[tuple[int, float, bool]]]:
    """The journal's samples by task: their numbers, seconds, and whether they count."""
    recorded: dict[Task, list[tuple[int, float, bool]]] = {}
    for number, record in enumerate(journal.records):
        try:
            task = Task(**{key: record[key] for key in ("kind", "size", "context", "batch")})
            seconds = float(record["seconds"])
            if not seconds > 0:
                raise ValueError
            recorded.setdefault(task, []).append((number, seconds, not record["disturbance"]))
        except (KeyError, TypeError, ValueError):
            raise InputError(
                f"{journal.path}, line {number + 2} is not a sample of this sweep",
                hint="Run again with --fresh to start over.",
            ) from None
    return recorded


def _collect(points: Mapping[Task, PointAccumulator]) -> tuple[dict[Task, Samples], list[Task]]:
    """The samples of each task, and the tasks without any."""
    samples: dict[Task, Samples] = {}
    unmeasured = []
    for task, point in points.items():
        try:
            samples[task] = point.samples
        except MeasurementError:
            unmeasured.append(task)
    wanted = sum(task.kind == "verify" for task in points)
    measured = sum(task.kind == "verify" for task in samples)
    if measured < MIN_GRID_SHARE * wanted:
        raise MeasurementError(
            f"only {measured} of {wanted} verification points could be measured",
            hint="Stop other work on this machine, and run again with a larger --time-budget; "
            "what was measured is kept.",
        )
    return samples, unmeasured


def _at_typical_pace(
    samples: Mapping[Task, Samples], taken: Mapping[Task, Sequence[int]]
) -> tuple[dict[Task, Samples], float]:
    """The samples with those of forwards over the machine's pace, and how that spread.

    taken  the numbers of each task's samples, those of its warm-up first
    """
    paced = [task for task in samples if task.kind in PACED]
    rows = sorted(
        (number, point, seconds)
        for point, task in enumerate(paced)
        for number, seconds in zip(
            taken[task][len(samples[task].warmup) :], samples[task].seconds, strict=True
        )
    )
    pace = paces([seconds for _, _, seconds in rows], [point for _, point, _ in rows])
    at_pace: list[list[float]] = [[] for _ in paced]
    for (_, point, seconds), slowness in zip(rows, pace.tolist(), strict=True):
        at_pace[point].append(seconds / slowness)
    found = {
        task: replace(samples[task], seconds=tuple(seconds))
        for task, seconds in zip(paced, at_pace, strict=True)
    }
    spread = float(np.log(pace).std()) if len(pace) else 0.0
    return dict(samples) | found, spread
