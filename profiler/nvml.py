"""What the NVIDIA driver says about one GPU, through NVML.

NVML counts the machine's GPUs, CUDA only those that CUDA_VISIBLE_DEVICES leaves and in its own
order, so a CUDA index is turned into an NVML handle through the GPU's UUID.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from costmodel.errors import DeviceError

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


def visible_entry(cuda_index: int, visible: str | None) -> str:
    """What CUDA_VISIBLE_DEVICES names at `cuda_index`: an index, a GPU or a MIG UUID.

    CUDA ignores everything from the first entry on that it cannot use; an index past the end
    is a `DeviceError`.
    """
    if visible is None:
        return str(cuda_index)
    entries: list[str] = []
    for entry in (part.strip() for part in visible.split(",")):
        if not (entry.isdigit() or entry.startswith(("GPU-", "MIG-"))):
            break
        entries.append(entry)
    if cuda_index >= len(entries):
        raise DeviceError(
            f"CUDA_VISIBLE_DEVICES={visible!r} leaves {len(entries)} GPU(s); there is no cuda:"
            f"{cuda_index}"
        )
    return entries[cuda_index]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU (or MIG slice) that NVML has opened."""

    nvml: Any
    handle: Any

    @classmethod
    def open(cls, cuda_index: int = 0) -> Gpu:
        """The GPU that CUDA calls `cuda_index`; `DeviceError` where NVML cannot tell."""
        import pynvml

        try:
            pynvml.nvmlInit()
            return cls(pynvml, _handle(pynvml, cuda_index))
        except pynvml.NVMLError as error:
            raise DeviceError(f"NVML: {error}", hint="Is the NVIDIA driver installed?") from error

    def thermal_slowdown(self) -> str:
        """The reasons that make a sample worthless just now; empty when there are none.

        Empty too where this GPU cannot tell (some virtual GPUs): `read` then lacks
        `gpu_clock_reasons`.
        """
        try:
            mask = int(self.nvml.nvmlDeviceGetCurrentClocksEventReasons(self.handle))
        except self.nvml.NVMLError:
            return ""
        return ", ".join(name for bit, name in THERMAL_REASONS.items() if mask & bit)

    def read(self) -> dict[str, Any]:
        """Every field that this driver and GPU can tell; the others are left out."""
        nvml, handle = self.nvml, self.handle
        readings: dict[str, Callable[[], Any]] = {
            "gpu_name": lambda: _text(nvml.nvmlDeviceGetName(handle)),
            "gpu_uuid": lambda: _text(nvml.nvmlDeviceGetUUID(handle)),
            "driver": lambda: _text(nvml.nvmlSystemGetDriverVersion()),
            "gpu_memory_bytes": lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
            "gpu_memory_free_bytes": lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).free),
            "gpu_sm_clock_hz": lambda: 1e6 * nvml.nvmlDeviceGetClockInfo(handle, 1),
            "gpu_sm_clock_max_hz": lambda: 1e6 * nvml.nvmlDeviceGetMaxClockInfo(handle, 1),
            "gpu_memory_clock_hz": lambda: 1e6 * nvml.nvmlDeviceGetClockInfo(handle, 2),
            "gpu_temperature_c": lambda: int(nvml.nvmlDeviceGetTemperature(handle, 0)),
            "gpu_power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            "gpu_power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
            "gpu_utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "gpu_clock_reasons": lambda: list(
                clock_reasons(int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)))
            ),
            "gpu_ecc": lambda: bool(nvml.nvmlDeviceGetEccMode(handle)[0]),
            "gpu_mig": lambda: bool(nvml.nvmlDeviceGetMigMode(handle)[0]),
            "gpu_persistence": lambda: bool(nvml.nvmlDeviceGetPersistenceMode(handle)),
            "gpu_other_processes": self._other_processes,
        }
        found = {}
        for name, reading in readings.items():
            with contextlib.suppress(nvml.NVMLError):
                found[name] = reading()
        return found

    def _other_processes(self) -> list[int]:
        running = self.nvml.nvmlDeviceGetComputeRunningProcesses(self.handle)
        return [int(process.pid) for process in running if int(process.pid) != os.getpid()]


class GpuGuard:
    """Rejects samples taken while heat or the power supply held the clocks down."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def start(self) -> None:
        """Nothing to remember: the driver tells the present state."""

    def disturbance(self) -> str:
        return self._gpu.thermal_slowdown()


def _handle(nvml: Any, cuda_index: int) -> Any:
    for uuid in _torch_uuids(cuda_index):
        with contextlib.suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetHandleByUUID(uuid)
    entry = visible_entry(cuda_index, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if entry.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(entry))
    return _handle_by_uuid(nvml, entry)


def _handle_by_uuid(nvml: Any, entry: str) -> Any:
    """CUDA takes a unique beginning of a UUID, NVML only the whole."""
    with contextlib.suppress(nvml.NVMLError):
        return nvml.nvmlDeviceGetHandleByUUID(entry)
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        if _text(nvml.nvmlDeviceGetUUID(handle)).startswith(entry):
            return handle
    raise DeviceError(f"no GPU has the UUID {entry} that CUDA_VISIBLE_DEVICES names")


def _torch_uuids(cuda_index: int) -> list[str]:
    """The UUID that torch knows, as a whole GPU and as a MIG slice; empty without CUDA."""
    import torch

    if not torch.cuda.is_available() or cuda_index >= torch.cuda.device_count():
        return []
    uuid = getattr(torch.cuda.get_device_properties(cuda_index), "uuid", None)
    return [] if uuid is None else [f"MIG-{uuid}", f"GPU-{uuid}"]


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
