"""The adaptive grid on known costs: it stops where they are predictable, and goes on where not."""

from __future__ import annotations

import numpy as np
import pytest

from costmodel.architecture import ModelArchitecture
from costmodel.catalog import Peaks
from costmodel.roofline import Roofline
from profiler.calibrate.points import FIRST_POINTS, LEAST_POINTS, AdaptiveGrid, SweepPlan
from profiler.calibrate.sweep import SweepResult, Task
from profiler.measure.samples import PointSamples

PLAN = SweepPlan(contexts=(64, 256, 1024, 4096), max_nodes=255)
ARCHITECTURE = ModelArchitecture(
    name="small", layers=12, hidden=768, heads=12, kv_heads=4, head_dim=64, ffn=3072,
    vocab=32000, tied=True,
)  # fmt: skip
ROOFLINE = Roofline(
    architecture=ARCHITECTURE, peaks=Peaks(flops_per_s=1e12, bytes_per_s=5e10), element_bytes=2
)


def smooth_s(task: Task) -> float:
    return 0.002 + 1.3 * float(ROOFLINE.seconds(task.size, task.context))


def rough_s(task: Task) -> float:
    """Every shape is off by a factor of its own: nothing can be learnt from its neighbours."""
    random = np.random.default_rng((task.size, task.context))
    return smooth_s(task) * float(np.exp(random.normal(0.0, 0.3)))


class Measured:
    """What a sweep that knows the truth has measured so far."""

    def __init__(self, true_s) -> None:
        self._true_s = true_s
        self.tasks: list[Task] = []

    def add(self, tasks: list[Task]) -> SweepResult:
        self.tasks += tasks
        random = np.random.default_rng(0)
        samples = {
            task: PointSamples(seconds=tuple(self._true_s(task) * random.normal(1, 0.001, 6)))
            for task in self.tasks
        }
        return SweepResult(samples=samples, unmeasured=(), spent_s=1.0, resumed_samples=0)

    def grid(self) -> list[Task]:
        return [task for task in self.tasks if task.kind == "verify"]


def run(true_s) -> tuple[Measured, list[Task] | None]:
    """All rounds of an adaptive sweep without a budget."""
    grid, measured = AdaptiveGrid(PLAN.grid(), ROOFLINE), Measured(true_s)
    swept = measured.add(grid.first() + PLAN.held_out())
    while further := grid.more(swept):
        assert not set(further) & set(measured.tasks)
        swept = measured.add(further)
    return measured, further


def test_the_first_points_hold_the_plain_step_and_the_largest_tree():
    first = AdaptiveGrid(PLAN.grid(), ROOFLINE).first()
    assert len(set(first)) == FIRST_POINTS
    assert {task.size for task in first} >= {1, max(PLAN.rows)}
    assert {task.context for task in first} >= {64, 4096}


def test_it_stops_where_held_out_points_are_predicted():
    measured, answer = run(smooth_s)
    assert answer is None
    assert LEAST_POINTS <= len(measured.grid()) < len(PLAN.grid()) / 2


@pytest.mark.slow
def test_it_measures_the_whole_grid_where_they_are_not():
    measured, answer = run(rough_s)
    assert answer == []
    assert set(measured.grid()) == set(PLAN.grid())
    assert len(measured.grid()) == len(PLAN.grid())


def test_samples_suffice_once_choices_cost_little():
    measured, _ = run(smooth_s)
    assert AdaptiveGrid(PLAN.grid(), ROOFLINE).uncertain(measured.add([])) is None


def test_samples_do_not_suffice_where_no_neighbour_tells_of_a_point():
    swept = Measured(rough_s).add(PLAN.grid() + PLAN.held_out())
    uncertain = AdaptiveGrid(PLAN.grid(), ROOFLINE).uncertain(swept)
    assert uncertain is not None
    assert uncertain.worst_regret > 0.03
    assert set(uncertain.tasks) <= swept.samples.keys()


def test_one_point_that_looks_fast_is_in_doubt_with_its_neighbours():
    """The prediction is smooth; at one held-out point a wrong median promises twice the speed."""
    held_out = PLAN.held_out()
    context = held_out[0].context
    lucky = max(task for task in held_out if task.context == context)

    def true_s(task):
        return smooth_s(task) * (0.5 if task == lucky else 1.0)

    swept = Measured(true_s).add(PLAN.grid() + held_out)
    uncertain = AdaptiveGrid(PLAN.grid(), ROOFLINE).uncertain(swept)
    assert uncertain is not None
    assert lucky in uncertain.tasks
    around = [max(c for c in PLAN.contexts if c <= context)]
    around.append(min(c for c in PLAN.contexts if c >= context))
    below = max(rows for rows in PLAN.rows if rows <= lucky.size)
    above = min(rows for rows in PLAN.rows if rows >= lucky.size)
    neighbours = {Task(kind="verify", size=r, context=c) for r in (below, above) for c in around}
    assert neighbours <= set(uncertain.tasks)
    assert len(uncertain.tasks) < len(PLAN.grid()) / 2


@pytest.mark.parametrize("batches", [(1,), (1, 4)])
def test_batches_are_candidates_too(batches):
    plan = SweepPlan(contexts=(64, 512), max_nodes=15, batches=batches)
    first = AdaptiveGrid(plan.grid(), ROOFLINE).first()
    assert {task.batch for task in first} <= set(batches)
    assert set(first) <= set(plan.grid())
