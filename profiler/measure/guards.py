"""Guards: they reject samples that the machine disturbed."""

from __future__ import annotations

import time
from statistics import median
from typing import Any, Protocol

import psutil

from decoder.nvml import POWER_CAP, THERMAL_REASONS, Gpu, Reading, clock_reasons
from profiler.measure.machine import stolen_s, throttled_s


class Guard(Protocol):
    """Detects disturbed samples (throttled clocks, stolen processor time)."""

    def start(self) -> None:
        """Called just before a sample."""
        ...

    def disturbance(self) -> str:
        """What disturbed the sample since `start`; empty when nothing did."""
        ...

    def summary(self) -> dict[str, Any]:
        """The state of the device over all samples, in the fields of the metadata."""
        ...


class NoGuard:
    """Accepts every sample."""

    def start(self) -> None:
        """Does nothing."""

    def disturbance(self) -> str:
        return ""

    def summary(self) -> dict[str, Any]:
        return {}


class CpuGuard:
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

    def summary(self) -> dict[str, Any]:
        """Empty: a CPU guard keeps no state beside the rejections."""
        return {}


class GpuGuard:
    """Rejects samples taken at low clocks, and keeps the GPU's readings.

    A sample is rejected while heat or the power supply holds the clocks down, and while the
    clock is below `FLOOR_SHARE` of the highest clock seen so far. A clock lowered by the power
    cap is accepted: under full load that is the steady state.
    """

    FLOOR_SHARE = 0.8

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._highest_hz = 0.0
        self.readings: list[Reading] = []

    def start(self) -> None:
        """Nothing to note: the driver tells the present state."""

    def disturbance(self) -> str:
        reading = self._gpu.sample()
        self.readings.append(reading)
        clock_hz, reasons = reading.sm_clock_hz, reading.reasons or 0
        held = ", ".join(name for bit, name in THERMAL_REASONS.items() if reasons & bit)
        if held or clock_hz is None:
            return held
        self._highest_hz = max(self._highest_hz, clock_hz)
        if clock_hz < self.FLOOR_SHARE * self._highest_hz and not reasons & POWER_CAP:
            return (
                f"SM clock {clock_hz / 1e6:.0f} MHz, below {self.FLOOR_SHARE:.0%} of "
                f"{self._highest_hz / 1e6:.0f} MHz"
            )
        return ""

    def summary(self) -> dict[str, Any]:
        """Statistics of all readings, named as the fields of `Gpu.read`."""
        fields: dict[str, Any] = {}
        for name, field, reduce in (
            ("gpu_sm_clock_hz", "sm_clock_hz", median),
            ("gpu_temperature_c", "temperature_c", max),
            ("gpu_power_w", "power_w", median),
        ):
            readings = [getattr(reading, field) for reading in self.readings]
            values = [value for value in readings if value is not None]
            if values:
                fields[name] = reduce(values)
        mask = 0
        for reading in self.readings:
            mask |= reading.reasons or 0
        if any(reading.reasons is not None for reading in self.readings):
            fields["gpu_clock_reasons"] = list(clock_reasons(mask))
        return fields
