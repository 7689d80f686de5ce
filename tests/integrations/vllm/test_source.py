"""The points of an engine's calibration, and the steps that they become."""

from types import SimpleNamespace

import pytest

from integrations.vllm.engine import StepTime
from integrations.vllm.source import EnginePlan, EngineWorkload
from profiler.calibrate.sweep import Task

PLAN = EnginePlan(contexts=(64, 256, 2048), batches=(1, 2, 8), most_rows=16, drafts=True)


class NotedEngine(SimpleNamespace):
    """An engine that notes its steps: 20 ms each, a quarter of it the drafter's."""

    def step(self, **shape: int) -> StepTime:
        self.steps.append(shape)
        return StepTime(verify_s=0.015, draft_s=0.005, host_s=0.001)


def engine() -> NotedEngine:
    return NotedEngine(steps=[], longest_context=2048, most_requests=8)


def test_held_out_points_depend_on_the_seed_alone():
    drawn = PLAN.held_out()
    assert drawn == PLAN.held_out()
    other = EnginePlan(contexts=(64, 2048), batches=(1, 8), most_rows=16, drafts=False, seed=1)
    assert other.held_out() != drawn
    for task in drawn:
        assert 64 <= task.context <= 2048 and 1 <= task.batch <= 8 and 1 <= task.size <= 16
    shapes = {(task.context, task.batch) for task in drawn}
    assert all(Task(kind="held_out", size=1, context=c, batch=b) in drawn for c, b in shapes)
    assert not {context for context, _ in shapes} <= set(PLAN.contexts)


def test_drafts_form_a_full_grid():
    tasks = PLAN.draft_tasks()
    axes = [{getattr(task, name) for task in tasks} for name in ("batch", "size", "context")]
    assert axes == [{1, 8}, {0, 1, 7, 15}, {64, 2048}]
    assert len(set(tasks)) == len(tasks) == 2 * 4 * 2
    without = EnginePlan(contexts=(64, 2048), batches=(1,), most_rows=16, drafts=False)
    assert without.draft_tasks() == []


def test_tasks_become_steps():
    stepped = engine()
    workload = EngineWorkload(stepped)
    verify = Task(kind="verify", size=4, context=256, batch=2)
    draft = Task(kind="draft", size=3, context=256, batch=2)
    assert workload.call(verify)() == 0.015
    assert workload.call(draft)() == 0.005
    shape = {"rows": 4, "context": 256, "batch": 2}
    assert stepped.steps == [shape | {"draft_tokens": 0}, shape | {"draft_tokens": 3}]
    assert workload.host_s == [0.001, 0.001]


@pytest.mark.parametrize(("changed", "reason"), [
    ({"context": 4096}, "max_model_len leaves room for 2048"), ({"batch": 9}, "runs 8 sequences"),
])  # fmt: skip
def test_what_the_engine_has_no_room_for(changed, reason):
    shape = {"kind": "verify", "size": 2, "context": 64, "batch": 1}
    workload = EngineWorkload(engine())
    assert workload.shortfall(Task(**shape)) == ""
    assert reason in workload.shortfall(Task(**(shape | changed)))
