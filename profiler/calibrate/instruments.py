"""The instruments of a sweep: timer, guard and stopping rule of a device, on one rank or several.

Several ranks run the same sweep, so their instruments have to report the same on all of them: a
sample is the largest of the ranks' times, and the clock is the latest of their clocks.

The largest time, with all ranks started together, is the time until the step is done everywhere.
Work without a collective (building, accepting, committing) ends with the slowest rank. A forward
ends on all ranks at once, so its times differ only by the skew of the start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from costmodel.errors import DeviceError
from decoder.model.ranks import Ranks
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


def on_all_ranks(tools: Instruments, ranks: Ranks) -> Instruments:
    """The instruments, reporting the same on every rank."""
    if ranks.alone:
        return tools
    return replace(
        tools, timer=CommonTimer(tools.timer, ranks), guard=CommonGuard(tools.guard, ranks)
    )


class CommonTimer:
    """Times a call that all ranks make together: the largest of their times."""

    def __init__(self, timer: Timer, ranks: Ranks) -> None:
        self._timer, self._ranks = timer, ranks
        self._start_s = timer.now_s()

    def time_s(self, function: Callable[[], object]) -> float:
        self._ranks.largest(0.0)  # a barrier, so that no time includes another rank's delay
        return self._ranks.largest(self._timer.time_s(function))

    def now_s(self) -> float:
        return self._ranks.largest(self._timer.now_s() - self._start_s)


class CommonGuard:
    """Rejects a sample that was disturbed on any rank."""

    def __init__(self, guard: Guard, ranks: Ranks) -> None:
        self._guard, self._ranks = guard, ranks

    def start(self) -> None:
        self._guard.start()

    def disturbance(self) -> str:
        return self._ranks.any_text(self._guard.disturbance())

    def summary(self) -> dict[str, Any]:
        """The state of this rank's own device."""
        return self._guard.summary()
