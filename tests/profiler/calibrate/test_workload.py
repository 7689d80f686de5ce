"""What is timed is what the decoder runs: the same methods, shapes and cache."""

import numpy as np
import pytest
import torch

from decoder.acceptance.rules import accept_together
from decoder.drafters.ngram import NgramDrafter, NgramSession
from decoder.model.target import Target
from decoder.tree.draft_tree import best_first
from profiler.calibrate import decoder as module
from profiler.calibrate.decoder import ACCEPTED_DEPTH, Task, Workload
from profiler.calibrate.sweep import OutOfMemory
from tests.decoder.models import random_model, target_of

CAPACITY = 200


@pytest.fixture
def target():
    return target_of(random_model("llama-gqa", dtype=torch.float32))


@pytest.fixture
def work(target):
    return Workload(target, NgramDrafter(), capacity=CAPACITY)


@pytest.fixture
def seen(monkeypatch):
    """(name, cached tokens, batch, first argument) of every call of the target's methods."""
    calls: list[tuple] = []
    for name in ("prefill", "verify", "commit"):
        original = getattr(Target, name)

        def spy(self, *arguments, name=name, original=original):
            (cached,) = set(self.cache.lengths)
            calls.append((name, cached, self.cache.sequences, arguments[0]))
            return original(self, *arguments)

        monkeypatch.setattr(Target, name, spy)
    return calls


@pytest.mark.parametrize("kind", ["verify", "held_out"])
@pytest.mark.parametrize(("rows", "context", "batch"), [(1, 100, 1), (7, 33, 1), (16, 100, 2)])
def test_verify_is_the_decoders_own(work, seen, kind, rows, context, batch):
    logits = work.call(Task(kind=kind, size=rows, context=context, batch=batch))()
    ((name, cached, width, steps),) = seen
    assert (name, cached, width) == ("verify", context, batch)
    assert [step.tree.rows for step in steps] == [rows] * batch
    assert [step.sequence for step in steps] == list(range(batch))
    assert [part.shape for part in logits] == [(rows, 97)] * batch


def test_trees_branch_and_deepen(work, seen):
    work.call(Task(kind="verify", size=64, context=9))()
    tree = seen[0][3][0].tree
    assert tree.depths.max() >= 4 and np.bincount(tree.parents).max() >= 3


def test_every_call_starts_from_the_same_length(work, seen):
    tasks = {
        "verify": Task(kind="verify", size=5, context=50),
        "prefill": Task(kind="prefill", size=20),
        "commit": Task(kind="commit", size=3, context=40),
    }
    calls = {name: work.call(task) for name, task in tasks.items()}
    order = ["verify", "prefill", "verify", "commit", "commit", "verify", "prefill"]
    for name in order:
        calls[name]()
    assert [call[:2] for call in seen] == [(name, tasks[name].context) for name in order]


def test_prefill_commit_and_draft_see_what_the_decoder_gives_them(work, target, seen, monkeypatch):
    work.call(Task(kind="prefill", size=37))()
    assert seen[0][:2] == ("prefill", 0) and seen[0][3].shape == (37,)
    assert target.cache.lengths == [37]
    work.call(Task(kind="commit", size=4, context=50))()
    assert seen[1:] == [("commit", 50, 1, [0, 2, 4, 6, 8])]
    assert target.cache.lengths == [50 + 5]
    asked = []
    monkeypatch.setattr(
        NgramSession, "draft", lambda self, context, request: asked.append((context, request))
    )
    work.call(Task(kind="draft", size=1, context=123))()
    context, request = asked[-1]
    assert len(context) == 123 + 1  # the bonus token is not cached
    assert request.depth == NgramDrafter().max_depth
    assert len(set(context.tolist())) < 60  # so that there is something to match


@pytest.mark.parametrize(("nodes", "depth"), [(1, 1), (3, 3), (15, 3), (63, 3)])
def test_build_is_best_first_and_acceptance_walks_a_usual_path(work, nodes, depth):
    assert work.call(Task(kind="build", size=nodes))().nodes == nodes
    assert module.best_first is best_first
    for kind in ("accept", "accept_sampled"):
        (outcome,) = work.call(Task(kind=kind, size=nodes))()
        assert len(outcome.rows) == min(depth, ACCEPTED_DEPTH)
    assert module.accept_together is accept_together


def test_the_cache_holds_noise_and_is_kept(work, target):
    work.call(Task(kind="verify", size=3, context=10))()
    cache = target.cache
    assert cache.capacity == CAPACITY
    assert cache.data.std() == pytest.approx(1.0, abs=0.05)
    work.call(Task(kind="verify", size=3, context=10, batch=2))()
    assert target.cache is not cache
    work.call(Task(kind="verify", size=9, context=10))()
    assert target.cache is cache


class TestMemory:
    def test_a_cache_takes_what_the_memory_leaves(self, target):
        """2 layers x 2 KV heads x 8 wide, keys and values, float32: 256 bytes a token."""
        work = Workload(target, NgramDrafter(), capacity=CAPACITY, capacities={2: 50})
        free = {"bytes": 10**9}
        work._free_bytes = lambda: free["bytes"]
        fitting = Task(kind="verify", size=10, context=CAPACITY - 10)
        assert work.shortfall(fitting) == ""
        assert target.cache.capacity == CAPACITY
        assert work.shortfall(Task(kind="plain", size=1, context=49, batch=2)) == ""
        assert target.cache.capacity == 50
        free["bytes"] = 4 * 256 * 125
        assert work.shortfall(Task(kind="verify", size=4, context=90, batch=4)) == ""
        assert target.cache.capacity == 100  # 80 % of what is free, in 4 sequences
        late = Task(kind="verify", size=11, context=90, batch=4)
        assert work.shortfall(late) == "101 tokens x batch 4; memory is left for 100"
        assert work.shortfall(Task(kind="commit", size=8, context=90, batch=4)) != ""

    def test_caches_of_all_batches_lie_in_the_largest(self, target):
        """Beside one cache of 4 sequences memory is left for 20 slots in each."""
        sizes = {1: 199, 2: 49, 4: 99}
        work = Workload(target, NgramDrafter(), capacity=CAPACITY, capacities=sizes)

        def held():
            stored = [cache.data.untyped_storage() for cache in work._caches.values()]
            return {storage.data_ptr(): storage.nbytes() for storage in stored}

        work._free_bytes = lambda: 256 * 4 * 125 - sum(held().values())
        for batch, capacity in sizes.items():
            work.call(Task(kind="verify", size=4, context=9, batch=batch))()
            assert target.cache.capacity == capacity
        assert len(held()) == 1

    def test_a_forward_too_large(self, target):
        work = Workload(target, NgramDrafter(), capacity=CAPACITY)
        assert work.shortfall(Task(kind="verify", size=1, context=0)) == ""
        work._free_bytes = lambda: 30_000
        told = work.shortfall(Task(kind="verify", size=100, context=0))
        assert "a forward of 100 rows needs some" in told
        assert work.shortfall(Task(kind="build", size=1000)) == ""

    def test_memory_that_runs_out_is_told_as_such(self, work, monkeypatch):
        def full(self, steps):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB.\nDetails")

        run = work.call(Task(kind="verify", size=4, context=10))
        monkeypatch.setattr(Target, "verify", full)
        with pytest.raises(OutOfMemory, match=r"out of memory: CUDA out of memory. Tried 2 GiB.$"):
            run()
