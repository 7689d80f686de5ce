"""The instruments of a measurement: timers of a call, and guards that reject disturbed samples."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

import psutil
import torch

from costmodel.errors import DeviceError
from decoder.nvml import CLOCK_REASONS, POWER_CAP, THERMAL_REASONS, Gpu
from profiler.measure.machine import stolen_s, throttled_s
from profiler.measure.samples import NoiseRule

MIN_SAMPLES = 10  # fewer may have a small spread by chance
MOST_TIME_S = 1.5  # of a point; a long prefill needs no more
L2_BYTES = 128 << 20  # assumed where the device does not report its L2 cache; above all known sizes


class WallTimer:
    """`time.perf_counter` around the call, with the garbage collector off; the base of others."""

    def time_s(self, function: Callable[[], object]) -> float:
        """Seconds of one call of `function`, until its work on the device is done."""
        enabled = gc.isenabled()
        gc.disable()
        try:
            return self._seconds(function)
        finally:
            if enabled:
                gc.enable()

    def _seconds(self, function: Callable[[], Any]) -> float:
        start_s = time.perf_counter()
        function()
        return time.perf_counter() - start_s

    def now_s(self) -> float:
        return time.perf_counter()


class CudaTimer(WallTimer):
    """CUDA events on the current stream of `device`, from an idle device and a cold L2 cache.

    The time between them includes the host's launch work wherever the device waits for it, as it
    does in decoding. The L2 cache is overwritten before each sample: a repeated call would read
    from it what a decoder reads from memory.
    """

    def __init__(
        self, device: Any = None, cuda: Any = None, flush: Callable[[], object] | None = None
    ) -> None:
        """cuda, flush: in place of `torch.cuda` and the overwriting of the L2 cache, in tests."""
        self._cuda = torch.cuda if cuda is None else cuda
        self._device = device
        self._flush = l2_flush(device) if flush is None else flush
        with self._cuda.device(device):
            self._start = self._cuda.Event(enable_timing=True)
            self._end = self._cuda.Event(enable_timing=True)

    def _seconds(self, function: Callable[[], Any]) -> float:
        self._flush()
        self._cuda.synchronize(self._device)
        stream = self._cuda.current_stream(self._device)
        self._start.record(stream)
        function()
        self._end.record(stream)
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1e3


class ReportTimer(WallTimer):
    """For functions that time the part of them that counts, and return its seconds."""

    def _seconds(self, function: Callable[[], Any]) -> float:
        return float(function())


def l2_flush(device: Any) -> Callable[[], object]:
    """A function that writes twice the L2 cache's size on a CUDA device."""
    properties = torch.cuda.get_device_properties(device)
    cache_bytes = int(getattr(properties, "L2_cache_size", 0)) or L2_BYTES
    scratch = torch.empty(2 * cache_bytes, dtype=torch.uint8, device=device or "cuda")
    return scratch.zero_


class Guard:
    """Detects disturbed samples (throttled clocks, stolen processor time); the base finds none."""

    def start(self) -> None:
        """Called just before a sample."""

    def disturbance(self) -> str:
        """What disturbed the sample since `start`; empty when nothing did."""
        return ""

    def summary(self) -> dict[str, Any]:
        """The state of the device over all samples, in the fields of the metadata."""
        return {}


class CpuGuard(Guard):
    """Rejects samples during which the host or a container quota took processor time away."""

    # The kernel counts stolen time in ticks of 10 ms, so one tick in a short sample means little.
    MAX_SHARE = 0.1

    def __init__(self) -> None:
        self._cores = psutil.cpu_count() or 1
        self.start()

    def start(self) -> None:
        self._stolen_s = stolen_s()
        self._throttled_s = throttled_s()
        self._start_s = time.perf_counter()

    def disturbance(self) -> str:
        elapsed_s = max(time.perf_counter() - self._start_s, 1e-9)
        if (stolen_s() - self._stolen_s) / (elapsed_s * self._cores) > self.MAX_SHARE:
            return "processor time stolen by the host"
        if (throttled_s() - self._throttled_s) / elapsed_s > self.MAX_SHARE:
            return "container quota used up"
        return ""


class GpuGuard(Guard):
    """Rejects samples taken at low clocks, and keeps the GPU's readings.

    A sample is rejected while heat or the power supply holds the clocks down, and while the
    clock is below `FLOOR_SHARE` of the highest clock seen so far. A clock lowered by the power
    cap is accepted: under full load that is the steady state.
    """

    FLOOR_SHARE = 0.8
    # What is read of every sample, and how the readings are summed up.
    FIELDS: ClassVar = {
        "gpu_sm_clock_hz": median,
        "gpu_temperature_c": max,
        "gpu_power_w": median,
        "gpu_clock_reasons": lambda every: sorted(set().union(*every), key=CLOCK_REASONS.index),
    }

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._highest_hz = 0.0
        self._readings: list[dict[str, Any]] = []

    def disturbance(self) -> str:
        reading = self._gpu.read(*self.FIELDS)
        self._readings.append(reading)
        clock_hz, reasons = reading.get("gpu_sm_clock_hz"), reading.get("gpu_clock_reasons", ())
        held = ", ".join(name for name in THERMAL_REASONS if name in reasons)
        if held or clock_hz is None:
            return held
        self._highest_hz = max(self._highest_hz, clock_hz)
        if clock_hz < self.FLOOR_SHARE * self._highest_hz and POWER_CAP not in reasons:
            return (
                f"SM clock {clock_hz / 1e6:.0f} MHz, below {self.FLOOR_SHARE:.0%} of "
                f"{self._highest_hz / 1e6:.0f} MHz"
            )
        return ""

    def summary(self) -> dict[str, Any]:
        """Statistics of all readings, named as the fields of `Gpu.read`."""
        read = {name: [one[name] for one in self._readings if name in one] for name in self.FIELDS}
        return {name: self.FIELDS[name](values) for name, values in read.items() if values}


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruments:
    """The timer of a sample, the guard that rejects it, and the rule that ends a point."""

    timer: WallTimer
    guard: Guard
    rule: NoiseRule


def instruments(device: torch.device) -> Instruments:
    rule = NoiseRule(min_samples=MIN_SAMPLES, max_time_s=MOST_TIME_S)
    if device.type == "cpu":
        return Instruments(timer=WallTimer(), guard=CpuGuard(), rule=rule)
    return Instruments(timer=CudaTimer(device), guard=gpu_guard(device.index or 0), rule=rule)


def gpu_guard(cuda_index: int) -> Guard:
    """A guard of clocks and temperature; one that accepts everything where there is no NVML."""
    try:
        return GpuGuard(Gpu.open(cuda_index))
    except DeviceError:
        return Guard()


def take_sample(function: Callable[[], object], tools: Instruments) -> tuple[float, str]:
    """Time one call under the guard: its seconds, and what disturbed it (empty: nothing)."""
    tools.guard.start()
    seconds = tools.timer.time_s(function)
    return seconds, tools.guard.disturbance()
