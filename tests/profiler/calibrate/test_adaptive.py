"""The adaptive grid on known costs: it stops where they are predictable, and goes on where not."""

import numpy as np
import pytest

from costmodel.architecture import ModelArchitecture
from costmodel.catalog import Peaks
from costmodel.roofline import Roofline
from profiler.calibrate import points
from profiler.calibrate.points import FIRST_POINTS, LEAST_POINTS, AdaptiveGrid, DecoderPoints
from profiler.calibrate.sweep import SweepResult, Task
from profiler.measure.samples import PointSamples

PLAN = DecoderPoints(contexts=(64, 256, 1024, 4096), max_nodes=255)
ARCHITECTURE = ModelArchitecture(
    name="small", layers=12, hidden=768, heads=12, kv_heads=4, head_dim=64, ffn=3072,
    vocab=32000, tied=True,
)  # fmt: skip
ROOFLINE, SLOW = (
    Roofline(architecture=ARCHITECTURE, peaks=Peaks(flops_per_s=flops, bytes_per_s=5e10),
             element_bytes=2)
    for flops in (1e12, 5e10)
)  # fmt: skip


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


def run(true_s) -> tuple[Measured, list[Task]]:
    """All points of an adaptive sweep, and those that it would time again."""
    grid, measured = AdaptiveGrid(PLAN.grid(), ROOFLINE, PLAN.held_out), Measured(true_s)
    swept = measured.add(grid.first())
    while further := grid.more(swept):
        assert not set(further) & set(measured.tasks)
        swept = measured.add(further)
    return measured, grid.again(swept)


def test_it_begins_with_the_extremes_and_stops_where_held_out_points_are_predicted():
    measured, again = run(smooth_s)
    assert again == []
    assert LEAST_POINTS <= len(measured.grid()) <= len(PLAN.grid()) / 2
    first = AdaptiveGrid(PLAN.grid(), ROOFLINE, PLAN.held_out).first()
    assert len(set(first)) == FIRST_POINTS
    assert {task.size for task in first} >= {1, max(PLAN.rows)}
    assert {task.context for task in first} >= {64, 4096}


@pytest.mark.slow
def test_it_measures_the_whole_grid_where_they_are_not():
    measured, again = run(rough_s)
    most = max(task.size for task in measured.tasks if task.kind == "held_out")
    assert set(measured.grid()) >= {task for task in PLAN.grid() if task.size <= most}
    assert len(measured.grid()) == len(set(measured.grid()))
    assert again


def steep_s(task: Task) -> float:
    """A row costs as much as reading the weights: the work of a slow CPU."""
    return float(SLOW.seconds(task.size, task.context))


def test_rows_that_no_tree_pays_for_are_first_points_and_still_held_out(monkeypatch):
    first = AdaptiveGrid(PLAN.grid(), ROOFLINE, PLAN.held_out).first()
    measured, _ = run(steep_s)
    most = max(task.size for task in measured.tasks if task.kind == "held_out")
    # 1 + 9 N / (N + 4) tokens, the best curve, over about N + 1 plain steps: highest at N = 2.
    assert 3 <= most <= 24
    beyond = {task for task in measured.tasks if task.size > most}
    assert beyond <= set(first)
    assert {task.size for task in measured.grid()} > {1, 2, 3}
    monkeypatch.setattr(points, "most_rows_that_pay", lambda shapes, slack: 1)
    measured, _ = run(smooth_s)
    drawn = [task.size for task in measured.tasks if task.kind == "held_out"]
    assert 1 in drawn and 4 <= max(drawn) <= 8


def test_points_are_timed_again_where_none_is_held_out_and_where_no_fit_explains_them():
    """None fits into memory, and one of the others is twenty times too slow."""
    slow = Task(kind="verify", size=2, context=64)
    grid, measured = AdaptiveGrid(PLAN.grid(), ROOFLINE), Measured(smooth_s)
    swept = measured.add([slow, *PLAN.grid()])
    assert grid.again(swept) == []
    swept.samples[slow] = PointSamples(seconds=(20 * smooth_s(slow),) * 3)
    assert grid.again(swept)[0] == slow
    grid = AdaptiveGrid(PLAN.grid(), ROOFLINE, PLAN.held_out)
    measured = Measured(lambda task: 1e-3 / (task.size * task.context))
    swept = measured.add(grid.first())
    further = grid.more(swept)
    assert {task.kind for task in further} == {"verify", "held_out"}
    swept = measured.add(further)
    assert set(grid.again(swept)) == set(measured.grid())


def test_every_row_count_matters_where_held_out_points_are_given():
    plan = DecoderPoints(contexts=(64, 1024), max_nodes=127)
    grid, measured = AdaptiveGrid(plan.grid(), ROOFLINE), Measured(steep_s)
    swept = measured.add(grid.first() + plan.held_out(128))
    while further := grid.more(swept):
        swept = measured.add(further)
    beyond = [task for task in measured.grid() if task.size > 24]
    assert len(beyond) > len([task for task in grid.first() if task.size > 24])


def test_points_that_the_others_contradict_are_timed_again_until_they_have_samples():
    """Three samples of one disturbed phase make a point that is twenty times too slow."""
    lucky = Task(kind="verify", size=2, context=64)

    def answer(samples: int) -> list[Task]:
        grid, measured = AdaptiveGrid(PLAN.grid(), ROOFLINE, PLAN.held_out), Measured(smooth_s)
        grid.more(measured.add(grid.first()))
        swept = measured.add([lucky, *PLAN.grid(), *PLAN.held_out(256)])
        swept.samples[lucky] = PointSamples(seconds=(20 * smooth_s(lucky),) * samples)
        return grid.again(swept)

    assert answer(3)[0] == lucky
    assert lucky not in answer(12)[:1]
