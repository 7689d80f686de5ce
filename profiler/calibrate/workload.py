"""The decoder's own functions as calls to time, and the memory that they need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import psutil
import torch

from costmodel.architecture import ModelArchitecture
from costmodel.errors import InputError
from decoder.acceptance.rules import AcceptanceRule, accept_together
from decoder.acceptance.sampling import Sampling
from decoder.drafters.base import Drafter
from decoder.model.kv_cache import KVCache
from decoder.model.runtime.eager import greedy_tokens
from decoder.model.target import Step, Target
from decoder.nvml import free_gpu_bytes
from decoder.profiling.probe import steady_draft
from decoder.tree.draft_tree import EMPTY, DraftTree, Lattice, best_first
from profiler.calibrate.sweep import OutOfMemory, Task

FORWARDS = ("verify", "held_out", "plain")  # kinds that time a verification forward
LATTICE_DEPTH = 15  # gamma of a block of 16
TIMED_SAMPLING = Sampling(temperature=1.0, top_p=0.9)  # top-p is what costs
CERTAIN = 100.0  # a logit above zeros whose token is drawn at temperature 1 too
ACCEPTED_DEPTH = 3  # rows that a timed acceptance walks: a typical acceptance length
# The share of free memory that a KV cache may take. Activations, captured forwards and the
# allocator's fragmentation need the rest; what graphs may still take is not counted as free.
CACHE_SHARE = 0.8
SPLIT_PARTS = 9  # float32 outputs of key ranges that tree attention merges at many rows


class Workload:
    """Turns tasks into calls of the decoder's functions on one target and drafter."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        *,
        capacity: int,
        capacities: Mapping[int, int] | None = None,
        seed: int = 0,
    ) -> None:
        """capacity: tokens of a KV cache, rows included; capacities: by batch size, where known.

        Raises InputError when the capacity exceeds the target's positions.
        """
        if capacity > target.max_context:
            raise InputError(
                f"a context of {capacity} tokens, rows included, exceeds the "
                f"{target.max_context} positions of {target.loaded.name}",
                hint="Choose smaller --contexts or --max-nodes.",
            )
        self._target = target
        self._drafter = drafter
        self._capacity, self._capacities = capacity, dict(capacities or {})
        self._free_bytes = partial(free_gpu_bytes, target.device)
        if target.device.type == "cpu":
            self._free_bytes = lambda: int(psutil.virtual_memory().available)
        self._seed = seed
        self._random = np.random.default_rng(seed)
        self._caches: dict[int, KVCache] = {}

    @property
    def device(self) -> torch.device:
        return self._target.device

    def call(self, task: Task) -> Callable[[], object]:
        """A function of no arguments that runs the task once, from the same state each time.

        The function raises OutOfMemory where the device's memory does not suffice.
        """
        if task.kind in FORWARDS:
            work = self._verify(task)
        else:
            work = {
                "prefill": self._prefill,
                "draft": lambda task: steady_draft(
                    self._drafter, self._target, task.context, self._seed
                ),
                "build": lambda task: partial(best_first, self._lattice(task.size), task.size),
                "accept": partial(self._accept, Sampling()),
                "accept_sampled": partial(self._accept, TIMED_SAMPLING),
                "commit": self._commit,
            }[task.kind](task)

        def run() -> object:
            try:
                return work()
            except torch.OutOfMemoryError as error:
                reason = str(error).partition("\n")[0]
                raise OutOfMemory(f"out of memory: {reason}") from error

        return run

    def shortfall(self, task: Task) -> str:
        """The reason why the task does not fit into memory; empty where it fits."""
        if task.kind not in (*FORWARDS, "prefill", "commit"):
            return ""
        tokens = task.context + (2 * task.size if task.kind == "commit" else task.size)
        try:
            capacity = self._use_cache(task.batch).capacity
        except InputError as error:
            return error.problem
        if tokens > capacity:
            return f"{tokens} tokens x batch {task.batch}; memory is left for {capacity}"
        chunk = self._target.prefill_chunk
        rows = min(task.size, chunk) if task.kind == "prefill" else task.size * task.batch
        work_bytes = forward_bytes(self._target.architecture, rows, self._target.dtype.itemsize)
        free_bytes = self._free_bytes()
        if task.kind in (*FORWARDS, "prefill") and work_bytes > free_bytes:
            return (
                f"a forward of {rows} rows needs some {work_bytes / 1e9:.1f} GB; "
                f"{free_bytes / 1e9:.1f} GB are free"
            )
        return ""

    def _verify(self, task: Task) -> Callable[[], object]:
        target, tree = self._target, self._tree(task.size - 1)
        steps = [Step(1, tree, sequence) for sequence in range(task.batch)]

        def run() -> object:
            cache = self._use_cache(task.batch)
            cache.truncate(task.context)
            done = target.verify(steps)
            refused = target.runtime.refusal(cache, task.size * task.batch)
            if refused:  # another forward than the one that is asked for
                raise OutOfMemory(f"not captured: {refused}")
            return done

        return run

    def _prefill(self, task: Task) -> Callable[[], object]:
        target = self._target
        ids = self._random.integers(0, target.architecture.vocab, task.size)
        prompt = torch.from_numpy(ids).to(target.device)

        def run() -> object:
            self._use_cache(task.batch).truncate(0)
            return [target.prefill(prompt, sequence) for sequence in range(task.batch)]

        return run

    def _accept(self, sampling: Sampling, task: Task) -> Callable[[], object]:
        target, tree = self._target, self._tree(task.size)
        logits = torch.zeros(
            tree.rows, target.architecture.vocab, dtype=target.dtype, device=target.device
        )
        row = 0
        for _ in range(ACCEPTED_DEPTH):  # the target follows a path of the tree, then leaves it
            children = np.flatnonzero(tree.parents == row)
            if len(children) == 0:
                break
            logits[row, int(tree.tokens[children[0]])] = CERTAIN
            row = int(children[0]) + 1
        rule = AcceptanceRule("walk", sampling, target.device)
        chosen = None
        if target.runtime.kind == "graphs":  # whose forwards choose the greedy tokens
            chosen = greedy_tokens(logits).cpu().numpy().copy
        return lambda: accept_together([rule], [tree], [logits], chosen)

    def _commit(self, task: Task) -> Callable[[], object]:
        target = self._target
        rows = [0, *range(2, 2 * task.size + 1, 2)]  # every row but the root's has to be moved
        states, pending = self._use_cache(task.batch).states, []
        if states is not None:  # which step along the rows of a forward
            self._use_cache(task.batch).truncate(task.context)
            tree = self._tree(2 * task.size)
            target.verify([Step(1, tree, sequence) for sequence in range(task.batch)])
            pending = list(states.pending)

        def run() -> None:
            cache = self._use_cache(task.batch)
            cache.truncate(task.context)
            if states is not None:
                states.pending = list(pending)
            for sequence in range(task.batch):
                target.commit(rows, sequence)

        return run

    def _use_cache(self, batch: int) -> KVCache:
        """The cache of this batch size, filled with noise: zeros may run faster.

        All lie in the memory of the first, which is the largest, since only one is used at a time.
        """
        if not self._caches and self._capacities:
            largest = max(self._capacities, key=lambda size: size * self._capacities[size])
            if largest != batch:
                self._caches[largest] = self._new_cache(largest, None)
        cache = self._caches.get(batch)
        if cache is None:
            first = next(iter(self._caches.values()), None)
            cache = self._caches[batch] = self._new_cache(batch, first)
        self._target.cache = cache
        return cache

    def _new_cache(self, batch: int, within: KVCache | None) -> KVCache:
        """A cache of the planned capacity, or of fewer tokens where memory is short."""
        a, target = self._target.architecture, self._target
        target.cache = None
        planes = iter(() if within is None else within.planes)

        def lent_zeros(shape: tuple[int, ...], **where: Any) -> torch.Tensor:
            """The beginning of the next plane; zeros of their own where that is smaller."""
            memory, numbers = next(planes, None), torch.Size(shape).numel()
            if memory is None or memory.numel() < numbers:
                return torch.zeros(shape, **where)
            return memory.view(-1)[:numbers].view(shape)

        # Bytes of one token in the caches of all sequences.
        each_bytes = 2 * a.attention_layers * batch * a.kv_width * target.dtype.itemsize
        capture = target.runtime.capture
        graphs_bytes = 0 if capture is None else capture.unused_bytes
        spare_bytes = int(CACHE_SHARE * (self._free_bytes() - graphs_bytes))
        lent = (within.capacity + 1) * within.sequences // batch - 1 if within else 0
        planned = self._capacities.get(batch, self._capacity)
        room = max(min(planned, max(spare_bytes // each_bytes, lent)), 1)
        cache = target.new_cache(room, batch, zeros=lent_zeros)
        cache.fill_with_noise()
        return cache

    def _lattice(self, nodes: int) -> Lattice:
        """Marginals of a typical drafter: 0.7, 0.23, 0.08, ... and 5 % less at each depth."""
        width = max(min(nodes, 64), 1)
        row = 0.7 * 3.0 ** -np.arange(width)
        fading = 0.95 ** np.arange(LATTICE_DEPTH)
        tokens = np.arange(LATTICE_DEPTH * width, dtype=np.int64).reshape(LATTICE_DEPTH, width)
        vocab = self._target.architecture.vocab
        return Lattice(tokens % vocab, fading[:, None] * row[None, :])

    def _tree(self, nodes: int) -> DraftTree:
        return best_first(self._lattice(nodes), nodes) if nodes else EMPTY


def forward_bytes(architecture: ModelArchitecture, rows: int, element_bytes: int) -> int:
    """An upper estimate of a forward's memory beside weights and cache.

    It counts the logits twice (as computed, and where they are kept), the widest activations
    of one layer, and the partial outputs of tree attention.
    """
    heads = architecture.heads * architecture.head_dim
    widest = 4 * architecture.hidden + 3 * max(architecture.ffn, heads)
    per_row = element_bytes * (2 * architecture.vocab + widest) + 4 * SPLIT_PARTS * heads
    return rows * per_row
