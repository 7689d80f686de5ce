"""NVIDIA's management library: handles of CUDA devices, their state, and the driver's soft keys.

NVML counts the machine's GPUs. CUDA counts those that CUDA_VISIBLE_DEVICES leaves, in its own
order. A CUDA index becomes an NVML handle through the GPU's UUID.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import psutil
import torch

from costmodel.errors import DeviceError

# Reasons for lower clocks. The thermal ones make a sample worthless; the power cap is the steady
# state of a GPU under full load and stays in what is measured.
POWER_CAP = "power cap"
THERMAL_REASONS = (
    "hardware slowdown", "software thermal slowdown", "hardware thermal slowdown",
    "hardware power brake",
)  # fmt: skip
# The bits of NVML's clocks-event-reasons mask, by position.
CLOCK_REASONS = (
    "idle", "application clocks", POWER_CAP, THERMAL_REASONS[0], "sync boost",
    *THERMAL_REASONS[1:], "display clocks",
)  # fmt: skip


def clock_reasons(mask: int) -> list[str]:
    return [name for bit, name in enumerate(CLOCK_REASONS) if mask >> bit & 1]


def failures(nvml: Any) -> tuple[type[Exception], ...]:
    """What a question to NVML may raise: its error, an old binding's, text not in UTF-8."""
    return nvml.NVMLError, OSError, ValueError, AttributeError


class Gpu:
    """One GPU (or MIG slice) that NVML has opened.

    board   the whole GPU, which has clocks, temperature and power; of a slice NVML tells only
            name, memory and processes. Where the driver hides the GPU around a slice, as in some
            containers, the slice itself
    sliced  whether `handle` is a MIG slice
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.nvml, self.handle, self.board, self.sliced = nvml, handle, handle, False
        with contextlib.suppress(*failures(nvml)):  # a driver that knows no MIG
            self.sliced = bool(nvml.nvmlDeviceIsMigDeviceHandle(handle))
            if self.sliced:
                self.board = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)

    @classmethod
    def open(cls, cuda_index: int = 0) -> Gpu:
        """The GPU that CUDA calls `cuda_index`. Raises DeviceError as `open_handle`."""
        return cls(*open_handle(cuda_index))

    def read(self, *names: str) -> dict[str, Any]:
        """Every field, or those of these names, that this driver and GPU can tell, and no other."""
        nvml, handle, board = self.nvml, self.handle, self.board
        readings: dict[str, Callable[[], Any]] = {
            "gpu_name": lambda: nvml.nvmlDeviceGetName(handle),
            "gpu_uuid": lambda: nvml.nvmlDeviceGetUUID(handle),
            "driver": lambda: nvml.nvmlSystemGetDriverVersion(),
            "gpu_memory_bytes": lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
            "gpu_memory_free_bytes": lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).free),
            "gpu_sm_clock_hz": lambda: 1e6 * float(nvml.nvmlDeviceGetClockInfo(board, 1)),
            "gpu_sm_clock_max_hz": lambda: 1e6 * nvml.nvmlDeviceGetMaxClockInfo(board, 1),
            "gpu_memory_clock_hz": lambda: 1e6 * nvml.nvmlDeviceGetClockInfo(board, 2),
            "gpu_temperature_c": lambda: int(nvml.nvmlDeviceGetTemperature(board, 0)),
            "gpu_power_w": lambda: float(nvml.nvmlDeviceGetPowerUsage(board)) / 1e3,
            "gpu_power_limit_w": lambda: float(nvml.nvmlDeviceGetEnforcedPowerLimit(board)) / 1e3,
            "gpu_utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "gpu_clock_reasons": lambda: clock_reasons(
                nvml.nvmlDeviceGetCurrentClocksEventReasons(board)
            ),
            "gpu_ecc": lambda: bool(nvml.nvmlDeviceGetEccMode(board)[0]),
            "gpu_mig": lambda: self.sliced or bool(nvml.nvmlDeviceGetMigMode(board)[0]),
            "gpu_persistence": lambda: bool(nvml.nvmlDeviceGetPersistenceMode(board)),
            "gpu_other_processes": self._other_processes,
        }
        fields = {}
        for name in names or readings:
            with contextlib.suppress(*failures(nvml)):
                fields[name] = readings[name]()
        return fields

    def _other_processes(self) -> list[dict[str, Any]]:
        """Process id, name and memory; without a name where it lies outside this container."""
        others: list[dict[str, Any]] = []
        for process in self.nvml.nvmlDeviceGetComputeRunningProcesses(self.handle):
            pid, name = int(process.pid), None
            if pid != os.getpid():
                with contextlib.suppress(psutil.Error):
                    name = str(psutil.Process(pid).name())
                memory_bytes = getattr(process, "usedGpuMemory", None)
                others.append({"pid": pid, "name": name, "memory_bytes": memory_bytes})
        return others


@cache
def driver_facts(cuda_index: int) -> dict[str, Any]:
    """`driver` version and `power_limit_w` of a CUDA device, read once; empty without NVML."""
    try:
        fields = Gpu.open(cuda_index).read("driver", "gpu_power_limit_w")
    except DeviceError:
        fields = {}
    return {"driver": fields.get("driver"), "power_limit_w": fields.get("gpu_power_limit_w")}


def open_handle(cuda_index: int) -> tuple[Any, Any]:
    """`pynvml`, initialised, and a CUDA device's handle. Raises DeviceError without one of them."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml, find_handle(pynvml, cuda_index)
    except ImportError as error:
        raise DeviceError(f"NVML: {error}", hint="Install nvidia-ml-py.") from error
    except failures(pynvml) as error:
        raise DeviceError(f"NVML: {error}", hint="Is the NVIDIA driver installed?") from error


def find_handle(nvml: Any, cuda_index: int) -> Any:
    """The handle of CUDA device `cuda_index`, a whole GPU or a MIG slice."""
    for uuid in _torch_uuids(cuda_index):
        with contextlib.suppress(*failures(nvml)):
            return nvml.nvmlDeviceGetHandleByUUID(uuid)
    return nvml.nvmlDeviceGetHandleByIndex(cuda_index)


def _torch_uuids(cuda_index: int) -> list[str]:
    """torch's UUID of the device as a MIG slice's and as a whole GPU's; empty without CUDA."""
    if not torch.cuda.is_available() or cuda_index >= torch.cuda.device_count():
        return []
    uuid = getattr(torch.cuda.get_device_properties(cuda_index), "uuid", None)
    return [] if uuid is None else [f"MIG-{uuid}", f"GPU-{uuid}"]


def check_built(device: torch.device) -> None:
    """Raise DeviceError for a GPU for which this torch has no kernels."""
    major, minor = torch.cuda.get_device_capability(device)
    built = torch.cuda.get_arch_list()
    if built and not any(_runs_on(one, 10 * major + minor) for one in built):
        raise DeviceError(
            f"this torch is built for {', '.join(built)}, and {device} is sm_{major}{minor}",
            hint="Install a build of torch for this GPU: pytorch.org lists them.",
        )


def check_current(device: torch.device) -> None:
    """Raise DeviceError for a GPU that is not the current one: kernels and events go to that."""
    if device.type != "cuda" or device.index is None or not torch.cuda.is_available():
        return
    if device.index != torch.cuda.current_device():
        raise DeviceError(
            f"{device} is not the current GPU of this process",
            hint=f"Start it with CUDA_VISIBLE_DEVICES={device.index}, and use the device cuda.",
        )


def _runs_on(built: str, architecture: int) -> bool:
    """Whether code for `sm_86` (this generation) or `compute_86` (later ones, too) runs there."""
    found = re.fullmatch(r"(sm|compute)_(\d+)", built)
    if found is None or int(found[2]) > architecture:
        return built == f"sm_{architecture}a"
    return found[1] == "compute" or int(found[2]) // 10 == architecture // 10


def free_gpu_bytes(device: torch.device) -> int:
    """Free bytes of a GPU, with what torch's allocator holds and does not use."""
    driver_bytes, _ = torch.cuda.mem_get_info(device)
    unused_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(driver_bytes + unused_bytes)


# Subclasses of RuntimeError that say nothing about a model's files.
DEVICE_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)


def failed_device(error: BaseException, device: torch.device) -> DeviceError:
    if isinstance(error, torch.OutOfMemoryError):
        return DeviceError(
            f"{device} has too little free memory", hint="Choose a smaller target, or free some."
        )
    reason = str(error).partition("\n")[0]
    return DeviceError(f"{device} failed: {reason}", hint="Look at nvidia-smi, and start again.")
