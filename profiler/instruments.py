"""What times a sweep and watches over it, by device."""

from __future__ import annotations

from typing import Any

import torch

from costmodel.errors import DeviceError
from profiler.cuda_timer import CudaTimer
from profiler.device import CpuGuard
from profiler.nvml import Gpu, GpuGuard
from profiler.stopping import NoiseRule
from profiler.sweep import Instruments
from profiler.timing import Guard, WallTimer

MIN_SAMPLES = 10  # fewer have a small spread by luck


class NoGuard:
    """Lets every sample pass, where there is no driver to ask."""

    def start(self) -> None:
        """Nothing to remember."""

    def disturbance(self) -> str:
        return ""

    def summary(self) -> dict[str, Any]:
        return {}


def instruments(device: torch.device) -> Instruments:
    """The timer, guard and stopping rule that suit the device."""
    rule = NoiseRule(min_samples=MIN_SAMPLES)
    if device.type == "cpu":
        return Instruments(timer=WallTimer(), guard=CpuGuard(), rule=rule)
    return Instruments(timer=CudaTimer(device), guard=gpu_guard(device.index or 0), rule=rule)


def gpu_guard(cuda_index: int) -> Guard:
    """Watches clocks and heat; nothing where NVML cannot, of which `device.warnings` tells."""
    try:
        return GpuGuard(Gpu.open(cuda_index))
    except DeviceError:
        return NoGuard()
