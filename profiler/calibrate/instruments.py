"""The instruments of a sweep: timer, guard and stopping rule of a device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from costmodel.errors import DeviceError
from decoder.nvml import Gpu
from profiler.measure.guards import CpuGuard, GpuGuard, Guard, NoGuard
from profiler.measure.stopping import NoiseRule, StoppingRule
from profiler.measure.timers import CudaTimer, Timer, WallTimer

MIN_SAMPLES = 10  # fewer may have a small spread by chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruments:
    """The timer of a sample, the guard that rejects it, and the rule that ends a point."""

    timer: Timer
    guard: Guard
    rule: StoppingRule


def instruments(device: torch.device) -> Instruments:
    """The instruments for a device."""
    rule = NoiseRule(min_samples=MIN_SAMPLES)
    if device.type == "cpu":
        return Instruments(timer=WallTimer(), guard=CpuGuard(), rule=rule)
    return Instruments(timer=CudaTimer(device), guard=gpu_guard(device.index or 0), rule=rule)


def gpu_guard(cuda_index: int) -> Guard:
    """A guard of clocks and temperature; one that accepts everything where NVML is not available.

    `machine.warnings` reports that case.
    """
    try:
        return GpuGuard(Gpu.open(cuda_index))
    except DeviceError:
        return NoGuard()
