"""This decoder as the source of a calibration: its own functions, on one target and drafter."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import psutil
import torch

from costmodel.errors import InputError
from decoder.acceptance.rules import AcceptanceRule, accept_together
from decoder.acceptance.sampling import Sampling
from decoder.device import dtype_name, fingerprint, parse_dtype, select_device
from decoder.drafters.base import Drafter
from decoder.drafters.factory import load_drafter
from decoder.model.kv_cache import KVCache
from decoder.model.loading import default_target, load_model
from decoder.model.making import make_target, quantised, runtime_kind
from decoder.model.runtime.eager import greedy_tokens
from decoder.model.target import Step, Target
from decoder.nvml import free_gpu_bytes
from decoder.profiling.measured_profile import peaks_of, subject_of
from decoder.profiling.probe import steady_draft
from decoder.profiling.startup import is_storable
from decoder.tree.draft_tree import EMPTY, DraftTree, Lattice, best_first
from profiler.calibrate.files import device_label
from profiler.calibrate.points import PREFILL_TOKENS, DecoderPoints
from profiler.calibrate.sections import drafter_sections
from profiler.calibrate.source import Additions, CalibrationSettings, PreparedSource
from profiler.calibrate.sweep import OutOfMemory, SweepResult, Task
from profiler.measure.instruments import instruments

CPU_CONTEXTS = (64, 256, 1024, 2048)
GPU_CONTEXTS = (64, 256, 1024, 4096, 16384)
CPU_MAX_NODES = 127
GPU_MAX_NODES = 1024
GPU_PREFILL_TOKENS = (128, 512, 2048, 8192)
GPU_PLAIN_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)  # for capacity planning
LIMITS_S = {"cuda": 45.0, "cpu": 65.0}  # a CPU is noisier; fits and the picture follow
FORWARDS = ("verify", "held_out", "plain")  # kinds that time a verification forward
LATTICE_DEPTH = 15  # gamma of a block of 16
TIMED_SAMPLING = Sampling(temperature=1.0, top_p=0.9)  # top-p is what costs
CERTAIN = 100.0  # a logit above zeros whose token is drawn at temperature 1 too
ACCEPTED_DEPTH = 3  # rows that a timed acceptance walks: a typical acceptance length
# The share of free memory that a KV cache may take. Activations, captured forwards and the
# allocator's fragmentation need the rest; what graphs may still take is not counted as free.
CACHE_SHARE = 0.8
SPLIT_PARTS = 9  # float32 outputs of key ranges that tree attention merges at many rows


class DecoderSource:
    """The very functions that `rooftree generate` runs: same mask, cache, kernels and graphs."""

    def __init__(self, settings: CalibrationSettings) -> None:
        """Check what can be checked without loading. Raises InputError or DeviceError."""
        if settings.max_nodes is not None and settings.max_nodes < 3:
            raise InputError(f"max nodes must be 3 or more, got {settings.max_nodes}")
        self._settings = settings
        self._device = select_device(settings.device)
        self._dtype = parse_dtype(settings.dtype, self._device)
        runtime_kind(settings.runtime, self._device)
        on_gpu = self._device.type == "cuda"
        self.cuda_index = self._device.index or 0 if on_gpu else None
        self.lock = f"{fingerprint(self._device).name} {device_label(self._device)}"

    def prepare(self, say: Callable[[str], None]) -> PreparedSource:
        settings, device = self._settings, self._device
        loaded = load_model(
            default_target(device) if settings.target is None else settings.target,
            weights=settings.weights,
            dtype=self._dtype,
            device=device,
        )
        loaded_s = time.perf_counter()
        target = make_target(quantised(loaded, settings.quantization), runtime=settings.runtime)
        self._target, self._drafter = target, load_drafter(settings.drafter, target)
        say(
            f"{loaded.name} ({loaded.weights} weights, {dtype_name(target.dtype)}) on "
            f"{fingerprint(device).name}"
        )
        if not is_storable(self._drafter):
            say(f"the cost of {self._drafter.name} is not kept: its package is not installed")
        plan = self._plan(target)
        workload = Workload(
            target, self._drafter, capacity=plan.capacity, capacities=plan.capacities(),
            seed=plan.seed,
        )  # fmt: skip
        return PreparedSource(
            subject=subject_of(target),
            peaks=peaks_of(device, target.dtype),
            grid=[task for task in plan.grid() if not workload.shortfall(task)],
            held_out=plan.held_out,
            fixed=plan.stages(),
            workload=workload,
            instruments=instruments(device),
            journal={
                "weights": loaded.weights,
                "threads": torch.get_num_threads(),
                "drafter": self._drafter.architecture_hash,
                "contexts": list(plan.contexts),
                "max_nodes": plan.max_nodes,
                "batches": list(plan.batches),
                "seed": plan.seed,
            },
            limit_s=LIMITS_S[device.type],
            loaded_s=loaded_s,
        )

    def additions(self, swept: SweepResult) -> Additions:
        return Additions(
            subject=subject_of(self._target),
            sections={"drafters": drafter_sections(swept, self._drafter)},
            warnings=self._target.runtime.warnings,
        )

    def _plan(self, target: Target) -> DecoderPoints:
        """The points for the device, at the runtime's buckets and within the target's positions."""
        settings, cpu = self._settings, self._device.type == "cpu"
        plan = DecoderPoints(
            contexts=settings.contexts or (CPU_CONTEXTS if cpu else GPU_CONTEXTS),
            max_nodes=settings.max_nodes or (CPU_MAX_NODES if cpu else GPU_MAX_NODES),
            batches=settings.batches or (1,),
            seed=settings.seed,
            buckets=target.runtime.buckets,
            prefill_tokens=PREFILL_TOKENS if cpu else GPU_PREFILL_TOKENS,
            plain_batches=() if cpu else GPU_PLAIN_BATCHES,
        )
        if settings.contexts is not None:
            return plan
        longest = target.max_context - plan.padded(plan.max_nodes + 1)
        contexts = tuple(context for context in plan.contexts if context <= longest)
        if len(contexts) < 2:
            raise InputError(
                f"{target.loaded.name} has {target.max_context} positions, too few for the usual "
                f"contexts and {plan.max_nodes} nodes",
                hint="Choose smaller --contexts and --max-nodes.",
            )
        return replace(plan, contexts=contexts)


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
        """capacity: tokens of a KV cache; capacities: those by batch size. Raises InputError."""
        if capacity > target.max_context:
            raise InputError(
                f"a context of {capacity} tokens, rows included, exceeds the "
                f"{target.max_context} positions of {target.loaded.name}",
                hint="Choose smaller --contexts or --max-nodes.",
            )
        self._target, self._drafter, self.device = target, drafter, target.device
        self._capacity, self._capacities = capacity, dict(capacities or {})
        self._free_bytes = partial(free_gpu_bytes, self.device)
        if self.device.type == "cpu":
            self._free_bytes = lambda: int(psutil.virtual_memory().available)
        self._seed = seed
        self._random = np.random.default_rng(seed)
        self._caches: dict[int, KVCache] = {}

    def call(self, task: Task) -> Callable[[], object]:
        """A function that runs the task once, always from the same state; it raises OutOfMemory."""
        work = {
            **dict.fromkeys(FORWARDS, self._verify),
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
        # Beside weights and cache: the logits twice (as computed, and where they are kept), the
        # widest activations of one layer, and the partial outputs of tree attention.
        a, free_bytes = self._target.architecture, self._free_bytes()
        heads = a.heads * a.head_dim
        numbers = 2 * a.vocab + 4 * a.hidden + 3 * max(a.ffn, heads)
        work_bytes = rows * (self._target.dtype.itemsize * numbers + 4 * SPLIT_PARTS * heads)
        if task.kind != "commit" and work_bytes > free_bytes:
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
        if states.shapes:  # which step along the rows of a forward
            self._use_cache(task.batch).truncate(task.context)
            tree = self._tree(2 * task.size)
            target.verify([Step(1, tree, sequence) for sequence in range(task.batch)])
            pending = list(states.pending)

        def run() -> None:
            cache = self._use_cache(task.batch)
            cache.truncate(task.context)
            if states.shapes:
                states.pending = list(pending)
            for sequence in range(task.batch):
                target.commit(rows, sequence)

        return run

    def _use_cache(self, batch: int) -> KVCache:
        """This batch size's cache, in the largest one's memory, full of noise: zeros are faster."""
        sizes = self._capacities
        largest = max(sizes, key=lambda size: size * sizes[size], default=batch)
        first = next(iter(self._caches), largest)
        for size in (first, batch):
            if size not in self._caches:
                self._caches[size] = self._new_cache(size, self._caches.get(first))
        self._target.cache = cache = self._caches[batch]
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
