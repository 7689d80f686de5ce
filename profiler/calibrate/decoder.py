"""This decoder as the source of a calibration: its own functions, on one target and drafter."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from costmodel.errors import InputError
from decoder.device import dtype_name, fingerprint, parse_dtype, select_device
from decoder.drafters.factory import load_drafter
from decoder.model.loading import default_target, load_model
from decoder.model.making import make_target, quantised, runtime_kind
from decoder.model.target import Target
from decoder.profiling.measured_profile import find_peaks, subject_of
from decoder.profiling.startup import is_storable
from profiler.calibrate.files import device_label
from profiler.calibrate.points import PREFILL_TOKENS, SweepPlan
from profiler.calibrate.sections import drafter_sections
from profiler.calibrate.source import Additions, CalibrationSettings, PreparedSource
from profiler.calibrate.sweep import SweepResult
from profiler.calibrate.workload import Workload
from profiler.measure.instruments import instruments

CPU_CONTEXTS = (64, 256, 1024, 2048)
GPU_CONTEXTS = (64, 256, 1024, 4096, 16384)
CPU_MAX_NODES = 127
GPU_MAX_NODES = 1024
GPU_PREFILL_TOKENS = (128, 512, 2048, 8192)
GPU_PLAIN_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)  # for capacity planning
LIMITS_S = {"cuda": 45.0, "cpu": 65.0}  # a CPU is noisier; fits and the picture follow


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
            peaks=find_peaks(target),
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
        drafters = drafter_sections(swept, self._drafter)
        return Additions(
            subject=subject_of(self._target),
            sections={"drafters": drafters},
            warnings=self._target.runtime.warnings,
        )

    def _plan(self, target: Target) -> SweepPlan:
        """The points for the device, at the runtime's buckets and within the target's positions.

        Contexts of the settings stay; the workload refuses those beyond the target's positions.
        """
        settings, cpu = self._settings, self._device.type == "cpu"
        plan = SweepPlan(
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
