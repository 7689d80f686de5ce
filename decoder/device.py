"""Torch devices and dtypes by name, and a device's fingerprint for the profile lookup."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from costmodel.catalog import DeviceFingerprint
from costmodel.errors import DeviceError, shown
from decoder.cpu import cpu_name, this_cpu
from decoder.names import check_device, no_cuda
from decoder.nvml import check_built, check_current, driver_facts


def select_device(name: str | None = None) -> torch.device:
    """The torch device of a name; None, `auto`: CUDA where there is one. Raises DeviceError."""
    if name is None or name == "auto":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if device.type == "cuda":
            check_built(device)
        return device
    check_device(str(name))
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if count == 0:
            raise no_cuda()
        if device.index is not None and device.index >= count:
            raise DeviceError(f"there is no {name}: torch sees {count} CUDA device(s)")
        check_current(device)
        check_built(device)
    return device


def default_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device computes in it; else float16 on CUDA, float32 on a CPU."""
    if device.type == "cuda":
        return torch.bfloat16 if has_bfloat16(device) else torch.float16
    return torch.bfloat16 if this_cpu().bfloat16 else torch.float32


def has_bfloat16(device: torch.device) -> bool:
    """Whether a CUDA device computes in bfloat16: from compute capability 8.0 (Ampere) on."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64")}


def parse_dtype(name: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """The torch dtype, also of a name; None, `auto`: the default. Raises DeviceError."""
    if name is None or name == "auto":
        return default_dtype(device)
    dtype = next((dtype for known, dtype in DTYPES.items() if name in (known, dtype)), None)
    if dtype is None:
        raise DeviceError(
            f"{shown(name)} is not a dtype", hint=f"Use one of {', '.join(DTYPES)} or auto."
        )
    if dtype == torch.bfloat16 and device.type == "cuda" and not has_bfloat16(device):
        raise DeviceError(
            f"{torch.cuda.get_device_name(device)} is too old to compute in bfloat16",
            hint="Use --dtype float16.",
        )
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(function: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, until its work on the device is done."""
    synchronise(device)
    start_s = perf_counter()
    function()
    synchronise(device)
    return perf_counter() - start_s


def to_device(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The array as a tensor, copied to CUDA without waiting; on a CPU it may share the memory."""
    # torch warns of arrays that cannot be written to, such as a drafter's context.
    writeable = array if array.flags.writeable else array.copy()
    tensor = torch.from_numpy(np.ascontiguousarray(writeable))
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def fingerprint(device: torch.device) -> DeviceFingerprint:
    """The device's keys of the profile lookup: hard keys, and soft keys where they are known."""
    if device.type == "cpu":
        return DeviceFingerprint(
            kind="cpu",
            name=cpu_name(),
            memory_bytes=psutil.virtual_memory().total,
            threads=torch.get_num_threads(),
            instruction_set=this_cpu().label,
        )
    properties = torch.cuda.get_device_properties(device)
    facts = driver_facts(torch.cuda.current_device() if device.index is None else device.index)
    return DeviceFingerprint(
        kind="cuda",
        name=properties.name,
        memory_bytes=properties.total_memory,
        mig=properties.name.partition("MIG")[2].strip() or None,
        cuda=torch.version.cuda,
        **facts,
    )
