"""The NVML handle of a CUDA device, and what the driver says that profiles are checked by.

NVML counts the machine's GPUs, CUDA only those that CUDA_VISIBLE_DEVICES leaves and in its own
order, so a CUDA index is turned into an NVML handle through the GPU's UUID.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from costmodel.errors import DeviceError


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverFacts:
    """Soft keys of a GPU; None where the driver does not say."""

    driver: str | None = None
    power_limit_w: float | None = None


@cache
def driver_facts(cuda_index: int) -> DriverFacts:
    """Driver version and power limit of a CUDA device, asked for once a process.

    Empty where there is no NVML: a decoder runs without it.
    """
    try:
        nvml, handle = open_handle(cuda_index)
    except DeviceError:
        return DriverFacts()
    found: dict[str, Any] = {}
    with contextlib.suppress(nvml.NVMLError):
        found["driver"] = text(nvml.nvmlSystemGetDriverVersion())
    with contextlib.suppress(nvml.NVMLError):
        board, _ = board_of(nvml, handle)
        found["power_limit_w"] = nvml.nvmlDeviceGetEnforcedPowerLimit(board) / 1e3
    return DriverFacts(**found)


def open_handle(cuda_index: int) -> tuple[Any, Any]:
    """The NVML module and the handle of a CUDA device; DeviceError where NVML cannot tell."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml, find_handle(pynvml, cuda_index)
    except ImportError as error:
        raise DeviceError(f"NVML: {error}", hint="Install nvidia-ml-py.") from error
    except pynvml.NVMLError as error:
        raise DeviceError(f"NVML: {error}", hint="Is the NVIDIA driver installed?") from error


def board_of(nvml: Any, handle: Any) -> tuple[Any, bool]:
    """The handle of the whole GPU that clocks, heat and power belong to, and whether `handle`
    is a MIG slice of it.

    NVML answers for a slice only what is the slice's own (name, memory, processes). The slice
    itself where the driver does not give the GPU around it, as in some containers.
    """
    try:
        if not nvml.nvmlDeviceIsMigDeviceHandle(handle):
            return handle, False
    except nvml.NVMLError:  # a driver that knows no MIG
        return handle, False
    try:
        return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle), True
    except nvml.NVMLError:
        return handle, True


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


def find_handle(nvml: Any, cuda_index: int) -> Any:
    """The handle of what CUDA calls `cuda_index`, a whole GPU or a MIG slice."""
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
        if text(nvml.nvmlDeviceGetUUID(handle)).startswith(entry):
            return handle
    raise DeviceError(f"no GPU has the UUID {entry} that CUDA_VISIBLE_DEVICES names")


def _torch_uuids(cuda_index: int) -> list[str]:
    """The UUID that torch knows, as a whole GPU and as a MIG slice; empty without CUDA."""
    if not torch.cuda.is_available() or cuda_index >= torch.cuda.device_count():
        return []
    uuid = getattr(torch.cuda.get_device_properties(cuda_index), "uuid", None)
    return [] if uuid is None else [f"MIG-{uuid}", f"GPU-{uuid}"]


def text(value: str | bytes) -> str:
    """A string of NVML, which older bindings give as bytes."""
    return value.decode() if isinstance(value, bytes) else value
