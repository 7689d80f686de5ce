"""The sweep with a fake clock and fake work: order, journal, budget, resumption, damage."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from costmodel.errors import InputError, MeasurementError
from profiler.calibrate.instruments import Instruments
from profiler.calibrate.memory import OutOfMemory
from profiler.calibrate.sweep import (
    LEAST_SAMPLES,
    PACED,
    SAMPLES_A_ROUND,
    Doubt,
    Steering,
    run_sweep,
)
from profiler.calibrate.sweep_plan import ROWS, SweepPlan
from profiler.calibrate.workload import Task
from profiler.measure.journal import Journal
from tests.fake_timing import CountRule, FakeTimer

PLAN = SweepPlan(contexts=(64, 512), max_nodes=15)
HEADER = {"run": 1}
IN_DOUBT = Doubt(worst_regret=0.1, tasks=tuple(PLAN.grid()[:2]))


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
                raise OutOfMemory("out of memory: Tried to allocate 2 GiB")
            self.done.append(task)

        work.task = task
        return work


class FakeGuard:
    """Every `every`-th sample is disturbed; none without it."""

    def __init__(self, every: int = 0) -> None:
        self.every, self.count = every, 0

    def start(self) -> None:
        self.count += 1

    def disturbance(self) -> str:
        return "throttled" if self.every and self.count % self.every == 0 else ""

    def summary(self) -> dict:
        return {}


def true_s(task: Task) -> float:
    return 1e-3 * (1 + task.size / 10 + task.context / 1000)


class Run:
    """One sweep over `PLAN` (or given tasks) with five samples a point."""

    def __init__(self, folder: Path, **changed) -> None:
        self.path = folder / "run.jsonl"
        self.options = {"every": 0, "samples": 5, "budget_s": 1e9}
        self.options |= {"tasks": PLAN.tasks(), "more": lambda swept: ()}
        self.options |= {"limit_s": None, "doubt": lambda swept: None}
        self.options |= changed
        self.workload = FakeWorkload()
        self.timer = FakeTimer(lambda work: true_s(work.task))
        self.progress = []
        self.doubts: list[tuple[Doubt, float]] = []

    def __call__(self):
        tasks = self.options["tasks"]
        rule = CountRule(samples=self.options["samples"])
        guard = FakeGuard(self.options["every"])
        with Journal(self.path, HEADER) as journal:
            return run_sweep(
                tasks,
                self.workload,
                Instruments(timer=self.timer, guard=guard, rule=rule),
                journal,
                Steering(
                    budget_s=self.options["budget_s"],
                    limit_s=self.options["limit_s"],
                    doubt=self.options["doubt"],
                    on_doubt=lambda doubt, left_s: self.doubts.append((doubt, left_s)),
                    on_progress=self.progress.append,
                    more=self.options["more"],
                ),
            )

    def records(self) -> list[dict]:
        return [json.loads(line) for line in self.path.read_text().splitlines()[1:]]


def task_of(record: dict) -> Task:
    return Task(**{key: record[key] for key in ("kind", "size", "context", "batch")})


class TestPlan:
    def test_the_grid_is_rows_by_contexts_by_batches(self) -> None:
        plan = SweepPlan(contexts=(64, 512), max_nodes=15, batches=(1, 2))
        found = {(t.size, t.context, t.batch) for t in plan.grid()}
        rows = (1, 2, 3, 4, 6, 8, 12, 16)
        assert found == set(itertools.product(rows, (64, 512), (1, 2)))
        assert len(plan.grid()) == len(found)
        assert {t.kind for t in plan.grid()} == {"verify"}

    @pytest.mark.parametrize("most", [3, 15, 20, 127, 1024])
    def test_the_largest_tree_is_measured(self, most: int) -> None:
        rows = SweepPlan(contexts=(64, 512), max_nodes=most).rows
        assert rows[0] == 1
        assert rows[-1] == most + 1
        assert set(rows[:-1]) <= set(ROWS)
        assert list(rows) == sorted(set(rows))

    def test_full_buckets_and_powers_of_two(self) -> None:
        """Trees of 2^k - 1 nodes fill a bucket of 2^k rows."""
        assert {2**k for k in range(11)} <= set(ROWS)

    @pytest.mark.parametrize("seed", range(5))
    def test_held_out_points_lie_inside_and_off_the_grid(self, seed: int) -> None:
        plan = SweepPlan(contexts=(64, 256, 1024), max_nodes=127, seed=seed)
        points = plan.held_out()
        assert {t.kind for t in points} == {"held_out"}
        assert all(64 <= t.context <= 1024 and 1 <= t.size <= 128 for t in points)
        by_context = {c: [t.size for t in points if t.context == c] for c in {*_contexts(points)}}
        assert 2 <= len(by_context) <= 3  # two may round to one
        for rows in by_context.values():
            assert 1 in rows
            assert len(rows) == len(set(rows)) >= 6
            assert max(rows) >= 64

    def test_held_out_points_are_fixed_by_the_seed(self) -> None:
        plans = [SweepPlan(contexts=(64, 512), max_nodes=15, seed=seed) for seed in (0, 0, 1)]
        first, again, other = (plan.held_out() for plan in plans)
        assert first == again != other

    def test_held_out_points_have_a_batch_that_is_fitted(self) -> None:
        plan = SweepPlan(contexts=(64, 512), max_nodes=15, batches=(4, 2))
        assert {task.batch for task in plan.held_out()} == {2}

    def test_stages(self) -> None:
        kinds = Counter(task.kind for task in PLAN.stages())
        stages = {"prefill", "draft", "build", "accept", "accept_sampled", "commit"}
        assert set(kinds) == stages
        builds = [task.size for task in PLAN.stages() if task.kind == "build"]
        assert builds == [1, 3, 7, 15]
        assert {task.size for task in PLAN.stages() if task.kind == "commit"} == {1, 2, 4}

    def test_everything_fits_the_capacity(self) -> None:
        for task in PLAN.tasks():
            used = 2 * task.size + 1 if task.kind == "commit" else task.size
            assert task.context + used <= PLAN.capacity

    def test_no_task_twice(self) -> None:
        assert len(PLAN.tasks()) == len(set(PLAN.tasks()))

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"contexts": (256,)}, "two contexts"),
            ({"contexts": ()}, "contexts must be"),
            ({"contexts": (0, 5)}, "contexts must be"),
            ({"contexts": (64, 64)}, "contexts must not repeat"),
            ({"batches": (0,)}, "batches must be"),
            ({"batches": (1, 1)}, "batches must not repeat"),
            ({"max_nodes": 2}, "max nodes must be 3"),
        ],
    )
    def test_bad_plans(self, changed: dict, message: str) -> None:
        with pytest.raises(InputError, match=message):
            SweepPlan(**({"contexts": (64, 512), "max_nodes": 15} | changed))


def _contexts(points: list[Task]) -> list[int]:
    return [task.context for task in points]


class TestSweep:
    def test_every_point_is_measured(self, tmp_path: Path) -> None:
        run = Run(tmp_path)
        swept = run()
        assert swept.samples.keys() == set(PLAN.tasks())
        assert swept.unmeasured == ()
        assert swept.resumed_samples == 0
        for task, samples in swept.samples.items():
            assert samples.seconds == (true_s(task),) * 5
        assert swept.spent_s == pytest.approx(5 * sum(true_s(task) for task in PLAN.tasks()))

    def test_slow_spells_are_taken_out_and_resuming_does_not_change_that(
        self, tmp_path: Path
    ) -> None:
        run, calls = Run(tmp_path, samples=9), itertools.count()
        run.timer = FakeTimer(
            lambda work: true_s(work.task) * (1.5 if next(calls) % 30 < 12 else 1.0)
        )
        swept = run()
        forwards = [task for task in swept.samples if task.kind in PACED]
        off = [abs(swept.samples[task].median_s / true_s(task) - 1.0) for task in forwards]
        assert np.median(off) < 0.01 and swept.pace_spread > 0.1
        raw = [record["seconds"] / true_s(task_of(record)) for record in run.records()]
        assert {round(ratio, 6) for ratio in raw} == {1.0, 1.5}  # the journal keeps them as timed
        again = Run(tmp_path, samples=9)()
        assert again.samples == swept.samples and again.resumed_samples == len(raw)

    def test_every_call_is_warmed_up_before_any_is_timed(self, tmp_path: Path) -> None:
        run = Run(tmp_path)
        run()
        count = len(PLAN.tasks())
        assert run.workload.done[:count] == PLAN.tasks()
        assert len(run.workload.done) == count + 5 * count

    def test_each_pass_mixes_all_points_anew(self, tmp_path: Path) -> None:
        run = Run(tmp_path)
        run()
        order = [task_of(record) for record in run.records()]
        count = len(PLAN.tasks())
        passes = [order[start : start + count] for start in range(0, len(order), count)]
        assert len(passes) == 5
        assert all(set(one) == set(PLAN.tasks()) for one in passes)
        assert len({tuple(one) for one in passes}) == 5
        assert PLAN.tasks() not in passes

    def test_a_drift_does_not_look_like_a_trend(self, tmp_path: Path) -> None:
        """The machine becomes twice as slow while it is measured; all points alike."""
        run = Run(tmp_path, samples=20)
        total = 20 * len(PLAN.tasks())
        taken = itertools.count()
        run.timer = FakeTimer(lambda work: true_s(work.task) * (1 + next(taken) / total))
        swept = run()
        ratios = [samples.median_s / true_s(task) for task, samples in swept.samples.items()]
        assert np.ptp(ratios) < 0.1
        assert np.mean(ratios) == pytest.approx(1.5, abs=0.03)

    def test_disturbed_samples_are_counted_apart(self, tmp_path: Path) -> None:
        swept = Run(tmp_path, every=3)()
        rejected = sum(len(samples.rejected) for samples in swept.samples.values())
        assert all(samples.n == 5 for samples in swept.samples.values())
        assert rejected == pytest.approx(5 * len(PLAN.tasks()) / 2, rel=0.1)

    def test_progress_only_grows_and_ends(self, tmp_path: Path) -> None:
        run = Run(tmp_path, budget_s=7.0)
        run()
        done = [progress.points_done for progress in run.progress]
        spent = [progress.spent_s for progress in run.progress]
        assert done == sorted(done)
        assert spent == sorted(spent)
        assert done[-1] == run.progress[-1].points == len(PLAN.tasks())
        assert run.progress[-1].budget_s == 7.0


class TestBudget:
    def test_it_ends_the_sweep_and_what_is_left_is_named(self, tmp_path: Path) -> None:
        budget_s = 0.9 * sum(true_s(task) for task in PLAN.tasks())
        swept = Run(tmp_path, budget_s=budget_s)()
        assert budget_s <= swept.spent_s < budget_s + max(true_s(task) for task in PLAN.tasks())
        assert 0 < len(swept.unmeasured) < len(PLAN.tasks())
        assert swept.samples.keys() == set(PLAN.tasks()) - set(swept.unmeasured)

    def test_too_few_points_for_a_fit_are_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(MeasurementError, match=r"of 16 verification points.*--time-budget"):
            Run(tmp_path, budget_s=1e-6)()

    def test_a_machine_that_is_always_disturbed_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(MeasurementError, match="only 0 of 16 verification points"):
            Run(tmp_path, every=1)()

    def test_it_is_passed_until_the_samples_suffice(self, tmp_path: Path) -> None:
        """Asked at the budget and after each further quarter of it."""
        asked_at_s = []

        def doubt(swept) -> Doubt | None:
            asked_at_s.append(swept.spent_s)
            return None if len(asked_at_s) == 3 else IN_DOUBT

        run = Run(tmp_path, budget_s=10.0, limit_s=100.0, samples=1000, doubt=doubt)
        swept = run()
        longest_s = max(true_s(task) for task in PLAN.tasks())
        assert asked_at_s == pytest.approx([10.0, 12.5, 15.0], abs=2 * longest_s)
        assert swept.spent_s == asked_at_s[-1]

    def test_it_is_passed_to_the_limit_at_most(self, tmp_path: Path) -> None:
        swept = Run(
            tmp_path, budget_s=1.0, limit_s=1.6, samples=1000, doubt=lambda swept: IN_DOUBT
        )()
        assert 1.6 <= swept.spent_s < 1.6 + max(true_s(task) for task in PLAN.tasks())

    def test_it_is_passed_where_points_are_missing(self, tmp_path: Path) -> None:
        """Which is an error without a higher limit."""
        whole_s = sum(true_s(task) for task in PLAN.tasks())
        swept = Run(tmp_path, samples=1, budget_s=0.2 * whole_s, limit_s=2 * whole_s)()
        assert sum(task.kind == "verify" for task in swept.samples) >= 0.75 * len(PLAN.grid())

    def test_points_in_doubt_are_measured_further_when_all_are_done(self, tmp_path: Path) -> None:
        """Until the limit, and only they; the sweep tells of the time that is left."""
        run = Run(tmp_path, budget_s=1.0, limit_s=2.0, doubt=lambda swept: IN_DOUBT)
        swept = run()
        counts = {task: samples.n for task, samples in swept.samples.items()}
        assert {n for task, n in counts.items() if task not in IN_DOUBT.tasks} == {5}
        assert all(counts[task] > 20 for task in IN_DOUBT.tasks)
        assert 2.0 <= swept.spent_s < 2.0 + max(true_s(task) for task in PLAN.tasks())
        assert [doubt for doubt, _ in run.doubts] == [IN_DOUBT] * len(run.doubts)
        left_s = [left_s for _, left_s in run.doubts]
        assert left_s == sorted(left_s, reverse=True)
        assert 0 < left_s[-1] <= 0.25

    def test_further_samples_settle_a_doubt(self, tmp_path: Path) -> None:
        """A point whose first samples were slow is right once it has enough of them."""
        slow = IN_DOUBT.tasks[0]
        run = Run(tmp_path, budget_s=1.0, limit_s=10.0)
        calls = itertools.count()
        run.timer = FakeTimer(
            lambda work: true_s(work.task) * (3 if work.task == slow and next(calls) < 7 else 1)
        )

        def doubt(swept) -> Doubt | None:
            near = swept.samples[slow].median_s < 1.1 * true_s(slow)
            return None if near else Doubt(worst_regret=0.1, tasks=(slow,))

        run.options["doubt"] = doubt
        swept = run()
        assert swept.samples[slow].median_s == pytest.approx(true_s(slow))
        assert len(run.doubts) == 1
        others = {samples.n for task, samples in swept.samples.items() if task != slow}
        assert others == {5}

    def test_a_doubt_without_points_ends_it_when_all_are_done(self, tmp_path: Path) -> None:
        nothing = Doubt(worst_regret=0.1, tasks=())
        swept = Run(tmp_path, budget_s=1e3, limit_s=1e4, doubt=lambda swept: nothing)()
        assert {samples.n for samples in swept.samples.values()} == {5}

    def test_first_calls_are_outside_of_it(self, tmp_path: Path) -> None:
        """Compiling may take longer than all samples; no sample may contain it."""
        run = Run(tmp_path, budget_s=10.0)
        inner = run.workload.call

        def slow_at_first(task: Task):
            work = inner(task)

            def call() -> None:
                if task not in run.workload.done:
                    run.timer.advance(7.0)
                work()

            call.task = task
            return call

        run.workload.call = slow_at_first
        swept = run()
        assert run.workload.done[: len(PLAN.tasks())] == PLAN.tasks()
        assert swept.unmeasured == ()
        assert swept.spent_s <= 10.0
        for task, samples in swept.samples.items():
            assert max(samples.seconds) < 7.0, task


class TestJournal:
    def test_every_sample_is_written_before_the_next_is_taken(self, tmp_path: Path) -> None:
        run = Run(tmp_path)
        lines = []

        def timed(work) -> float:
            lines.append(len(run.path.read_text().splitlines()))
            return true_s(work.task)

        run.timer = FakeTimer(timed)
        run()
        assert lines == list(range(1, len(lines) + 1))

    @pytest.mark.parametrize("taken", [1, 30, 100])
    def test_an_interrupted_run_goes_on(self, tmp_path: Path, taken: int) -> None:
        whole = Run(tmp_path / "whole", every=4)()
        first = Run(tmp_path, every=4)
        count = itertools.count()

        def interrupted(work) -> float:
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
        assert swept.samples.keys() == whole.samples.keys()

    def test_points_that_are_done_are_not_run_again(self, tmp_path: Path) -> None:
        Run(tmp_path)()
        again = Run(tmp_path)
        swept = again()
        assert again.workload.done == []
        assert swept.resumed_samples == 5 * len(PLAN.tasks())

    def test_samples_of_tasks_no_longer_planned_are_passed_over(self, tmp_path: Path) -> None:
        Run(tmp_path)()
        swept = Run(tmp_path, tasks=PLAN.grid())()
        assert swept.samples.keys() == set(PLAN.grid())
        assert swept.resumed_samples == 5 * len(PLAN.grid())

    @pytest.mark.parametrize(
        "record",
        [
            {"kind": "verify"},
            {"kind": "verify", "size": 1, "context": 64, "batch": 1, "seconds": "fast"},
            {"kind": "verify", "size": 1, "context": 64, "batch": 1, "seconds": 1.0},
            {
                "kind": "verify",
                "size": 1,
                "context": 64,
                "batch": 1,
                "seconds": -1.0,
                "disturbance": "",
            },
            {"kind": "verify", "size": [], "context": 64, "batch": 1, "seconds": 1.0},
        ],
    )
    def test_what_is_no_sample_is_left_out_and_counted(self, tmp_path: Path, record: dict) -> None:
        run = Run(tmp_path)
        with Journal(run.path, HEADER) as journal:
            journal.append(record)
        swept = run()
        assert (swept.damaged_lines, swept.resumed_samples) == (1, 0)
        assert set(swept.samples) == set(PLAN.tasks())


class TestAdaptive:
    EXTRA = Task(kind="verify", size=5, context=77)

    def test_further_points_are_asked_for_once_each_has_some_samples(self, tmp_path: Path) -> None:
        asked = []

        def more(swept):
            asked.append({task: samples.n for task, samples in swept.samples.items()})
            return [self.EXTRA] if len(asked) == 1 else []

        swept = Run(tmp_path, more=more, samples=20)()
        assert set(asked[0]) == set(PLAN.tasks())
        assert all(n <= SAMPLES_A_ROUND for n in asked[0].values())
        assert set(asked[1]) == {*PLAN.tasks(), self.EXTRA}
        # None left: the rest of the budget goes into more samples of all of them.
        assert {samples.n for samples in swept.samples.values()} == {20}

    def test_a_disturbance_while_a_point_is_new_does_not_outweigh_the_rest(
        self, tmp_path: Path
    ) -> None:
        slow = []

        def more(swept):
            slow.append(len(slow) == 0)
            return [self.EXTRA] if slow[-1] else []

        run = Run(tmp_path, more=more, samples=10)
        run.timer = FakeTimer(lambda work: true_s(work.task) * (1.5 if slow[-1:] == [True] else 1))
        assert run().samples[self.EXTRA].median_s == true_s(self.EXTRA)
        assert sum(record["size"] == self.EXTRA.size for record in run.records()) >= 10

    def test_none_needed_ends_the_sweep(self, tmp_path: Path) -> None:
        swept = Run(tmp_path, more=lambda swept: None, samples=20)()
        assert {samples.n for samples in swept.samples.values()} == {LEAST_SAMPLES}


def test_a_runtime_that_pads_is_measured_at_its_buckets() -> None:
    plan = SweepPlan(contexts=(64, 512), max_nodes=100, buckets=(1, 4, 16, 64, 256))
    assert plan.rows == (1, 4, 16, 64, 256)
    assert plan.capacity == 512 + 256
    assert {task.size for task in plan.held_out()} <= {1, 4, 16, 64, 256}
    assert len(plan.held_out()) > 6


def test_points_that_do_not_fit_are_skipped_and_told(tmp_path: Path) -> None:
    """Known beforehand, or found out when the memory runs out."""
    run = Run(tmp_path)
    large, failing = PLAN.grid()[-1], PLAN.held_out()[-1]
    run.workload.too_large[large] = "32 tokens x batch 1; memory is left for 7"
    run.workload.failing.add(failing)
    swept = run()
    assert swept.skipped == {
        large: "32 tokens x batch 1; memory is left for 7",
        failing: "out of memory: Tried to allocate 2 GiB",
    }
    assert large not in run.workload.done and large not in swept.samples
    assert failing not in swept.samples and failing not in swept.unmeasured
    assert len(swept.samples) == len(PLAN.tasks()) - 2


def test_memory_that_runs_out_in_the_middle_loses_only_that_point(tmp_path: Path) -> None:
    run = Run(tmp_path)
    task = PLAN.grid()[3]
    count = itertools.count()

    def duration_s(work) -> float:
        if next(count) == 60:
            run.workload.failing.add(task)
        return true_s(work.task)

    run.timer = FakeTimer(duration_s)
    swept = run()
    assert list(swept.skipped) == [task]
    assert len(swept.samples) == len(PLAN.tasks()) - 1


def test_plain_steps_of_large_batches_belong_to_the_stages() -> None:
    plan = SweepPlan(
        contexts=(64, 512, 4096),
        max_nodes=15,
        plain_batches=(1, 8, 64),
        prefill_tokens=(128, 2048, 8192),
    )
    stages = plan.stages()
    plain = {(t.batch, t.context, t.size) for t in stages if t.kind == "plain"}
    assert plain == {(8, 64, 1), (8, 512, 1), (64, 64, 1), (64, 512, 1)}
    assert [t.size for t in stages if t.kind == "prefill"] == [128, 2048]
    assert plan.capacities() == {8: 513, 64: 513}
