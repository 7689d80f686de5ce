"""What the NVIDIA driver says about one GPU, through NVML."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import psutil

from decoder.nvml import board_of, open_handle, text

# Reasons for lower clocks that make a sample worthless. The power cap is not among them: it is
# the steady state of a GPU under full load and stays in what is measured.
THERMAL_REASONS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
OTHER_REASONS = {
    0x01: "idle",
    0x02: "application clocks",
    0x04: "power cap",
    0x10: "sync boost",
    0x100: "display clocks",
}


def clock_reasons(mask: int) -> tuple[str, ...]:
    """The names of the bits of NVML's clocks-event-reasons mask."""
    names = THERMAL_REASONS | OTHER_REASONS
    return tuple(name for bit, name in sorted(names.items()) if mask & bit)


class Gpu:
    """One GPU (or MIG slice) that NVML has opened.

    board   the whole GPU, which has the clocks, heat and power; the same without MIG
    sliced  whether `handle` is a MIG slice
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.nvml, self.handle = nvml, handle
        self.board, self.sliced = board_of(nvml, handle)

    @classmethod
    def open(cls, cuda_index: int = 0) -> Gpu:
        """The GPU that CUDA calls `cuda_index`; `DeviceError` where NVML cannot tell."""
        return cls(*open_handle(cuda_index))

    def read(self) -> dict[str, Any]:
        """Every field that this driver and GPU can tell; the others are left out."""
        nvml, handle, board = self.nvml, self.handle, self.board
        readings: dict[str, Callable[[], Any]] = {
            "gpu_name": lambda: text(nvml.nvmlDeviceGetName(handle)),
            "gpu_uuid": lambda: text(nvml.nvmlDeviceGetUUID(handle)),
            "driver": lambda: text(nvml.nvmlSystemGetDriverVersion()),
            "gpu_memory_bytes": lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
            "gpu_memory_free_bytes": lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).free),
            "gpu_sm_clock_hz": lambda: 1e6 * nvml.nvmlDeviceGetClockInfo(board, 1),
            "gpu_sm_clock_max_hz": lambda: 1e6 * nvml.nvmlDeviceGetMaxClockInfo(board, 1),
            "gpu_memory_clock_hz": lambda: 1e6 * nvml.nvmlDeviceGetClockInfo(board, 2),
            "gpu_temperature_c": lambda: int(nvml.nvmlDeviceGetTemperature(board, 0)),
            "gpu_power_w": lambda: nvml.nvmlDeviceGetPowerUsage(board) / 1e3,
            "gpu_power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(board) / 1e3,
            "gpu_utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "gpu_clock_reasons": lambda: list(
                clock_reasons(int(nvml.nvmlDeviceGetCurrentClocksEventReasons(board)))
            ),
            "gpu_ecc": lambda: bool(nvml.nvmlDeviceGetEccMode(board)[0]),
            "gpu_mig": lambda: self.sliced or bool(nvml.nvmlDeviceGetMigMode(board)[0]),
            "gpu_persistence": lambda: bool(nvml.nvmlDeviceGetPersistenceMode(board)),
            "gpu_other_processes": self._other_processes,
        }
        found = {}
        for name, reading in readings.items():
            with contextlib.suppress(nvml.NVMLError):
                found[name] = reading()
        return found

    def _other_processes(self) -> list[dict[str, Any]]:
        """Process id, name and memory; without a name where it lies outside this container."""
        running = self.nvml.nvmlDeviceGetComputeRunningProcesses(self.handle)
        return [
            {
                "pid": int(process.pid),
                "name": _process_name(int(process.pid)),
                "memory_bytes": getattr(process, "usedGpuMemory", None),
            }
            for process in running
            if int(process.pid) != os.getpid()
        ]

    def sample(self) -> Reading:
        """Clock, temperature, power and clock reasons just now; None for what it cannot tell."""
        nvml, board = self.nvml, self.board
        return Reading(
            sm_clock_hz=self._ask(lambda: 1e6 * nvml.nvmlDeviceGetClockInfo(board, 1)),
            temperature_c=self._ask(lambda: float(nvml.nvmlDeviceGetTemperature(board, 0))),
            power_w=self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(board) / 1e3),
            reasons=self._ask(lambda: int(nvml.nvmlDeviceGetCurrentClocksEventReasons(board))),
        )

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except self.nvml.NVMLError:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The state of a GPU at one moment."""

    sm_clock_hz: float | None
    temperature_c: float | None
    power_w: float | None
    reasons: int | None


class GpuGuard:
    """Rejects samples taken at low clocks, and keeps what it saw of the GPU meanwhile.

    A sample does not count while heat or the power supply holds the clocks down, or while
    the clock lies below `FLOOR_SHARE` of the highest one seen since the start, unless the
    power cap does that: under full load it is the steady state.
    """

    FLOOR_SHARE = 0.8
    POWER_CAP = 0x04

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._highest_hz = 0.0
        self.readings: list[Reading] = []

    def start(self) -> None:
        """Nothing to remember: the driver tells the present state."""

    def disturbance(self) -> str:
        reading = self._gpu.sample()
        self.readings.append(reading)
        clock_hz, reasons = reading.sm_clock_hz, reading.reasons or 0
        held = ", ".join(name for bit, name in THERMAL_REASONS.items() if reasons & bit)
        if held or clock_hz is None:
            return held
        self._highest_hz = max(self._highest_hz, clock_hz)
        if clock_hz < self.FLOOR_SHARE * self._highest_hz and not reasons & self.POWER_CAP:
            return (
                f"SM clock {clock_hz / 1e6:.0f} MHz, below {self.FLOOR_SHARE:.0%} of "
                f"{self._highest_hz / 1e6:.0f} MHz"
            )
        return ""

    def summary(self) -> dict[str, Any]:
        """What was seen during all samples, in the fields of `Gpu.read`."""
        found: dict[str, Any] = {}
        for name, field, reduce in (
            ("gpu_sm_clock_hz", "sm_clock_hz", median),
            ("gpu_temperature_c", "temperature_c", max),
            ("gpu_power_w", "power_w", median),
        ):
            values = [getattr(reading, field) for reading in self.readings]
            known = [value for value in values if value is not None]
            if known:
                found[name] = reduce(known)
        mask = 0
        for reading in self.readings:
            mask |= reading.reasons or 0
        if any(reading.reasons is not None for reading in self.readings):
            found["gpu_clock_reasons"] = list(clock_reasons(mask))
        return found


def _process_name(pid: int) -> str | None:
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return None
