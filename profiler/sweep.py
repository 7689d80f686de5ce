"""Which points are measured, and the loop that measures them.

All points are mixed: each pass takes one sample of every unfinished point, in a
fresh random order, so that a drift of the machine does not look like a trend.
Every sample goes into the journal before the next is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from costmodel.errors import InputError, MeasurementError
from profiler.journal import Journal
from profiler.stopping import StoppingRule
from profiler.timing import Guard, PointAccumulator, Samples, Timer, interleave, take_sample
from profiler.workload import Task, Workload

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1025)
PREFILL_TOKENS = (128, 512)
BUILD_NODES = (1, 3, 7, 15, 31, 63, 127, 255, 511, 1023)
COMMIT_TOKENS = (1, 2, 4, 8)
SAMPLES_A_ROUND = 6  # of every point before an adaptive sweep asks for further ones
MIN_GRID_SHARE = 0.75  # a profile from less would have holes that nobody sees


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """What a calibration covers; validated on construction.

    buckets  row counts that the runtime pads forwards to, which alone are measured; none
             where it does not pad
    """

    contexts: tuple[int, ...]
    max_nodes: int
    batches: tuple[int, ...] = (1,)
    held_out_contexts: int = 3
    held_out_rows: int = 6
    seed: int = 0
    buckets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, values in (("contexts", self.contexts), ("batches", self.batches)):
            if not values or any(value < 1 for value in values):
                raise InputError(f"{name} must be whole numbers of 1 or more, got {values}")
            if len(set(values)) < len(values):
                raise InputError(f"{name} must not repeat, got {values}")
        if len(self.contexts) < 2:
            raise InputError("a calibration needs two contexts or more", hint="As 256,1024.")
        if self.max_nodes < 3:
            raise InputError(f"max nodes must be 3 or more, got {self.max_nodes}")

    @property
    def rows(self) -> tuple[int, ...]:
        """Row counts of the grid, up to the largest tree and that one itself."""
        most = self.padded(self.max_nodes + 1)
        usual = self.buckets or ROWS
        return tuple(sorted({row for row in usual if row <= most} | {most}))

    def padded(self, rows: int) -> int:
        """Rows that a forward of `rows` rows runs."""
        return next((size for size in self.buckets if size >= rows), rows)

    @property
    def capacity(self) -> int:
        """Cache length that every point fits in."""
        return max(self.contexts) + self.padded(self.max_nodes + 1)

    def grid(self) -> list[Task]:
        return [
            Task(kind="verify", size=rows, context=context, batch=batch)
            for batch in self.batches
            for context in self.contexts
            for rows in self.rows
        ]

    def held_out(self) -> list[Task]:
        """Points that are never fitted: log-uniform contexts, log-uniform rows in each.

        Drawn from the seed before anything is measured. Rows are stratified over the range,
        one draw a stratum, and a plain step is added, so that each context can also tell
        what choosing a tree size from the predictions costs. All of the smallest batch.
        """
        random = np.random.default_rng((self.seed, 7919))
        low, high = np.log(min(self.contexts)), np.log(max(self.contexts))
        edges = np.linspace(np.log(2), np.log(self.max_nodes + 1), self.held_out_rows + 1)
        tasks = set()
        for context in np.exp(random.uniform(low, high, self.held_out_contexts)):
            drawn = np.exp(random.uniform(edges[:-1], edges[1:]))
            drawn_rows = (self.padded(rows) for rows in np.rint(drawn).astype(int).tolist())
            for rows in {1, *drawn_rows}:
                tasks.add(
                    Task(
                        kind="held_out",
                        size=rows,
                        context=round(context),
                        batch=min(self.batches),
                    )
                )
        return sorted(tasks)

    def stages(self) -> list[Task]:
        """Everything in a cycle but the verify forward, and the prefill."""
        middle = sorted(self.contexts)[len(self.contexts) // 2]
        builds = sorted({n for n in BUILD_NODES if n <= self.max_nodes} | {self.max_nodes})
        tasks = [Task(kind="prefill", size=n) for n in PREFILL_TOKENS if n <= max(self.contexts)]
        tasks += [Task(kind="draft", size=1, context=context) for context in self.contexts]
        tasks += [Task(kind="build", size=nodes) for nodes in builds]
        tasks += [Task(kind="accept", size=nodes) for nodes in builds]
        tasks += [
            Task(kind="commit", size=tokens, context=middle)
            for tokens in COMMIT_TOKENS
            if 2 * tokens <= self.max_nodes
        ]
        return tasks

    def tasks(self) -> list[Task]:
        return self.grid() + self.held_out() + self.stages()


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a sweep is: samples taken, points that are done, seconds spent and allowed."""

    points_done: int
    points: int
    spent_s: float
    budget_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """Samples by task; tasks that the budget left without a sample are in `unmeasured`."""

    samples: dict[Task, Samples]
    unmeasured: tuple[Task, ...]
    spent_s: float
    resumed_samples: int


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
    journal: Journal,
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
            return sweep.result()
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
        journal: Journal,
        steering: Steering,
    ) -> None:
        self._workload, self._instruments, self._journal = workload, instruments, journal
        self._steering = steering
        self._recorded = _recorded(journal)
        self._points: dict[Task, PointAccumulator] = {}
        self._calls: dict[Task, Callable[[], object]] = {}
        self._random = np.random.default_rng(0)
        self._spent_s = 0.0
        self._resumed = 0

    def add(self, tasks: Sequence[Task]) -> None:
        """Take tasks in, with what the journal holds of them, and warm up what is to measure."""
        for task in tasks:
            point = PointAccumulator(self._instruments.rule)
            for seconds, ok in self._recorded.get(task, []):
                point.add(seconds, ok=ok)
                self._spent_s += seconds
            self._resumed += point.attempts
            self._points[task] = point
            self._calls[task] = self._workload.call(task)
        waiting = [self._calls[task] for task in tasks if not self._points[task].done]
        _warm_up(waiting, self._instruments.timer, most_s=self._steering.budget_s / 2)

    def measure(self, samples: int | None) -> bool:
        """Measure until every point is done, or has so many samples; False: the budget is spent."""
        timer, guard = self._instruments.timer, self._instruments.guard
        start_s = timer.now_s() - self._spent_s
        for task in interleave(lambda: self._waiting(samples), self._random):
            sample = take_sample(self._calls[task], timer, guard)
            record = {"seconds": sample.seconds, "disturbance": sample.disturbance}
            self._journal.append(task.key() | record, durable=False)
            self._points[task].add(sample.seconds, ok=not sample.disturbance)
            self._spent_s = timer.now_s() - start_s
            self._tell()
            if self._spent_s >= self._steering.budget_s:
                return False
        return True

    def result(self) -> SweepResult:
        return _collect(self._points, self._spent_s, self._resumed)

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


def _recorded(journal: Journal) -> dict[Task, list[tuple[float, bool]]]:
    """The journal's samples by task: seconds, and whether they count."""
    recorded: dict[Task, list[tuple[float, bool]]] = {}
    for number, record in enumerate(journal.records, start=2):
        try:
            task = Task(**{key: record[key] for key in ("kind", "size", "context", "batch")})
            seconds = float(record["seconds"])
            if not seconds > 0:
                raise ValueError
            recorded.setdefault(task, []).append((seconds, not record["disturbance"]))
        except (KeyError, TypeError, ValueError):
            raise InputError(
                f"{journal.path}, line {number} is not a sample of this sweep",
                hint="Run again with --fresh to start over.",
            ) from None
    return recorded


def _warm_up(calls: Sequence[Callable[[], object]], timer: Timer, most_s: float) -> None:
    """Once through everything: first calls compile, allocate and choose kernels.

    On a machine so slow or busy that this alone takes `most_s`, the rest goes unwarmed;
    the first samples of a point are then cut by their own decline.
    """
    start_s = timer.now_s()
    for call in calls:
        call()
        if timer.now_s() - start_s > most_s:
            return


def _collect(points: Mapping[Task, PointAccumulator], spent_s: float, resumed: int) -> SweepResult:
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
    return SweepResult(
        samples=samples, unmeasured=tuple(unmeasured), spent_s=spent_s, resumed_samples=resumed
    )
