"""The sweep with a fake clock and fake work: order, journal, budget, resumption, damage."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from costmodel.errors import MeasurementError
from profiler.calibrate import sweep
from profiler.calibrate.points import DecoderPoints
from profiler.calibrate.sweep import CHOSEN, FIRST_SAMPLES, PACED, SAMPLES_A_ROUND, Task, run_sweep
from profiler.measure.instruments import Guard, Instruments
from profiler.measure.journal import Journal
from tests.fake_timing import CountRule, FakeTimer

PLAN = DecoderPoints(contexts=(64, 512), max_nodes=15)
HELD_OUT = PLAN.held_out(PLAN.max_nodes + 1)
TASKS = PLAN.grid() + HELD_OUT + PLAN.stages()
HEADER = {"run": 1}
DOUBTFUL = PLAN.grid()[:2]


class FakeWorkload:
    """Work that does nothing but say which task it was."""

    def __init__(self) -> None:
        self.done: list[Task] = []
        self.too_large: dict[Task, str] = {}
        self.failing: set[Task] = set()

    def shortfall(self, task: Task) -> str:
        return self.too_large.get(task, "")

    def call(self, task: Task):
        def work() -> None:
            if task in self.failing:
                raise sweep.OutOfMemory("out of memory: Tried to allocate 2 GiB")
            self.done.append(task)

        work.task = task
        return work


class FakeGuard(Guard):
    """Every `every`-th sample up to the last one is disturbed."""

    def __init__(self, every: int, last: int = 10**9) -> None:
        self.every, self.last, self.count = every, last, 0

    def start(self) -> None:
        self.count += 1

    def disturbance(self) -> str:
        return "throttled" * (self.count % self.every == 0 and self.count <= self.last)


def true_s(task: Task) -> float:
    return 1e-3 * (1 + task.size / 10 + task.context / 1000)


class Run:
    """One sweep over `PLAN` with five samples a point."""

    def __init__(self, folder: Path, samples: int = 5, **changed) -> None:
        self.path, self.rule, self.guard = folder / "run.jsonl", CountRule(samples=samples), Guard()
        self.workload, self.timer = FakeWorkload(), FakeTimer(lambda work: true_s(work.task))
        self.progress, self.told = [], []
        told = {"on_progress": lambda *now: self.progress.append(now), "on_state": self.told.append}
        usual = {"limit_s": 1e9, "more": lambda swept: (), "again": None}
        self.control = sweep.SweepControl(**(told | usual | changed))

    def __call__(self):
        tools = Instruments(timer=self.timer, guard=self.guard, rule=self.rule)
        with Journal(self.path, HEADER) as journal:
            return run_sweep(TASKS, self.workload, tools, journal, self.control)

    def records(self) -> list[dict]:
        return [json.loads(line) for line in self.path.read_text().splitlines()[1:]]


class TestPlan:
    def test_the_grid_is_rows_by_contexts_by_batches_and_fits_the_capacity(self):
        plan = DecoderPoints(contexts=(64, 512), max_nodes=15, batches=(1, 2))
        rows = (1, 2, 3, 4, 6, 8, 12, 16)
        found = sorted((t.size, t.context, t.batch) for t in plan.grid())
        assert found == sorted(itertools.product(rows, (64, 512), (1, 2)))
        assert {t.kind for t in plan.grid()} == {"verify"}
        for task in TASKS:
            used = 2 * task.size + 1 if task.kind == "commit" else task.size
            assert task.context + used <= PLAN.capacity

    @pytest.mark.parametrize("seed", range(5))
    def test_held_out_points_lie_inside_and_off_the_grid(self, seed):
        plan = DecoderPoints(contexts=(64, 256, 1024), max_nodes=127, seed=seed)
        points = plan.held_out(128)
        assert {t.kind for t in points} == {"held_out"}
        assert all(64 <= t.context <= 1024 and 1 <= t.size <= 128 for t in points)
        contexts = {t.context for t in points}
        by_context = {c: [t.size for t in points if t.context == c] for c in contexts}
        assert 2 <= len(by_context) <= 3  # two may round to one
        for rows in by_context.values():
            assert 1 in rows
            assert len(rows) == len(set(rows)) >= 6
            assert max(rows) >= 64


class TestSweep:
    def test_every_point_is_measured_and_a_drift_is_no_trend(self, tmp_path):
        swept = Run(tmp_path)()
        assert swept.samples.keys() == set(TASKS)
        assert (swept.unmeasured, swept.resumed_samples) == ((), 0)
        for task, samples in swept.samples.items():
            assert samples.seconds == (true_s(task),) * 5
        assert swept.spent_s == pytest.approx(5 * sum(true_s(task) for task in TASKS))
        # The machine becomes twice as slow while it is measured; all points alike
        run = Run(tmp_path / "drift", samples=20)
        total = 20 * len(TASKS)
        taken = itertools.count()
        run.timer = FakeTimer(lambda work: true_s(work.task) * (1 + next(taken) / total))
        swept = run()
        ratios = [samples.typical_s / true_s(task) for task, samples in swept.samples.items()]
        assert np.ptp(ratios) < 0.1
        assert np.mean(ratios) == pytest.approx(1.5, abs=0.03)

    def test_slow_spells_are_taken_out_and_resuming_does_not_change_that(self, tmp_path):
        run, calls = Run(tmp_path, samples=9), itertools.count()
        slow = (1.5 if call % 30 < 12 else 1.0 for call in calls)
        run.timer = FakeTimer(lambda work: true_s(work.task) * next(slow))
        swept = run()
        forwards = [task for task in swept.samples if task.kind in PACED]
        off = [abs(swept.samples[task].typical_s / true_s(task) - 1.0) for task in forwards]
        assert np.median(off) < 0.01 and swept.pace_spread > 0.1
        raw = []
        for record in run.records():
            own = {key: record[key] for key in ("kind", "size", "context", "batch")}
            raw.append(record["seconds"] / true_s(Task(**own)))
        assert {round(ratio, 6) for ratio in raw} == {1.0, 1.5}  # the journal keeps them as timed
        again = Run(tmp_path, samples=9)()
        assert again.samples == swept.samples and again.resumed_samples == len(raw)


class TestLimit:
    def test_it_ends_the_sweep_and_what_is_left_is_named(self, tmp_path):
        limit_s = 0.9 * sum(true_s(task) for task in TASKS)
        swept = Run(tmp_path, limit_s=limit_s)()
        assert limit_s <= swept.spent_s < limit_s + max(true_s(task) for task in TASKS)
        assert 0 < len(swept.unmeasured) < len(TASKS)
        assert swept.samples.keys() == set(TASKS) - set(swept.unmeasured)
        with pytest.raises(MeasurementError, match=r"of 16 verification points.*--time-budget"):
            Run(tmp_path / "short", limit_s=1e-6)()

    def test_points_in_doubt_are_timed_again_until_none_is_left_or_the_limit(self, tmp_path):
        asked = []

        def again(swept):
            asked.append({task: samples.n for task, samples in swept.samples.items()})
            return DOUBTFUL if len(asked) < 9 else []

        swept = Run(tmp_path, again=again)()
        counts = {task: samples.n for task, samples in swept.samples.items()}
        for task in TASKS:
            assert asked[0][task] == (FIRST_SAMPLES if task.kind in CHOSEN else 5)
            assert counts[task] - asked[0][task] == (8 if task in DOUBTFUL else 0)
        run = Run(tmp_path / "limit", limit_s=0.6, again=lambda swept: DOUBTFUL)
        swept = run()
        assert all(swept.samples[task].n > 20 for task in DOUBTFUL)
        assert 0.6 <= swept.spent_s < 0.6 + max(true_s(task) for task in TASKS)
        assert run.progress[-1][0] == 1.0

    def test_samples_that_are_rejected_one_after_another_are_told_and_replaced(self, tmp_path):
        run = Run(tmp_path, samples=1, limit_s=5.0)
        run.guard = FakeGuard(1, last=60)
        swept = run()
        assert run.told == ["throttled"]
        assert swept.samples.keys() == set(TASKS)

    def test_first_calls_count_but_are_no_samples(self, tmp_path):
        """Compiling may take longer than all samples."""
        run = Run(tmp_path, limit_s=5.0)
        inner = run.workload.call

        def slow_at_first(task):
            work = inner(task)

            def call():
                if task not in run.workload.done:
                    run.timer.advance(0.05)
                work()

            call.task = task
            return call

        run.workload.call = slow_at_first
        swept = run()
        assert 0.05 * len(TASKS) < swept.spent_s < 5.0
        for task, samples in swept.samples.items():
            assert max(samples.seconds) == true_s(task)


SAMPLE = {"kind": "verify", "size": 1, "context": 64, "batch": 1, "seconds": 1.0}


class TestJournal:
    @pytest.mark.parametrize("taken", [1, 30, 100])
    def test_an_interrupted_run_goes_on(self, tmp_path, taken):
        first, count = Run(tmp_path), itertools.count()
        first.guard = FakeGuard(4)

        def interrupted(work):
            if next(count) == taken:
                raise KeyboardInterrupt
            return true_s(work.task)

        first.timer = FakeTimer(interrupted)
        with pytest.raises(KeyboardInterrupt):
            first()
        assert len(first.records()) == taken
        before = sum(record["seconds"] for record in first.records())
        second = Run(tmp_path)
        swept = second()
        assert swept.resumed_samples == taken
        assert swept.spent_s == pytest.approx(sum(r["seconds"] for r in second.records()))
        assert swept.spent_s > before
        assert all(samples.n == 5 for samples in swept.samples.values())
        assert swept.samples.keys() == set(TASKS)

    @pytest.mark.parametrize("record", [
        {"kind": "verify"}, SAMPLE | {"seconds": "fast"}, SAMPLE, SAMPLE | {"size": []},
        SAMPLE | {"seconds": -1.0, "disturbance": ""},
    ])  # fmt: skip
    def test_what_is_no_sample_is_left_out_and_counted(self, tmp_path, record):
        run = Run(tmp_path)
        with Journal(run.path, HEADER) as journal:
            journal.append(record)
        swept = run()
        assert (swept.damaged_lines, swept.resumed_samples) == (1, 0)
        assert set(swept.samples) == set(TASKS)


def test_further_points_are_asked_for_and_those_that_do_not_fit_skipped(tmp_path):
    asked, extra = [], Task(kind="verify", size=5, context=77)

    def more(swept):
        asked.append({task: samples.n for task, samples in swept.samples.items()})
        return [extra] if len(asked) == 1 else []

    swept = Run(tmp_path, more=more, samples=20)()
    assert asked[0] == dict.fromkeys(TASKS, FIRST_SAMPLES)
    assert set(asked[1]) == {*TASKS, extra}
    assert asked[1][extra] == SAMPLES_A_ROUND
    # None left: the rule says of each when its samples suffice.
    assert {samples.n for samples in swept.samples.values()} == {20}
    run = Run(tmp_path / "large")
    large, failing = PLAN.grid()[-1], HELD_OUT[-1]
    run.workload.too_large[large] = "32 tokens x batch 1; memory is left for 7"
    run.workload.failing.add(failing)
    swept = run()
    reason = "out of memory: Tried to allocate 2 GiB"
    assert swept.skipped == {large: run.workload.too_large[large], failing: reason}
    assert large not in run.workload.done and large not in swept.samples
    assert failing not in swept.samples and failing not in swept.unmeasured
    assert len(swept.samples) == len(TASKS) - 2


def test_a_runtime_that_pads_is_measured_at_its_buckets_and_plain_batches_in_the_stages():
    plan = DecoderPoints(contexts=(64, 512), max_nodes=100, buckets=(1, 4, 16, 64, 256))
    assert plan.rows == (1, 4, 16, 64, 256)
    assert plan.capacity == 512 + 256
    held_out = plan.held_out(101)
    assert {task.size for task in held_out} <= {1, 4, 16, 64, 256}
    assert len(held_out) > 6
    plan = DecoderPoints(
        contexts=(64, 512, 4096), max_nodes=15, plain_batches=(1, 8, 64),
        prefill_tokens=(128, 2048, 8192),
    )  # fmt: skip
    stages = plan.stages()
    plain = {(t.batch, t.context, t.size) for t in stages if t.kind == "plain"}
    assert plain == {(8, 64, 1), (8, 512, 1), (64, 64, 1), (64, 512, 1)}
    assert [t.size for t in stages if t.kind == "prefill"] == [128, 2048]
    assert plan.capacities() == dict.fromkeys(plan.batches, plan.capacity) | {8: 513, 64: 513}
