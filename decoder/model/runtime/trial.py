"""A trial of our Triton kernels on a GPU, and the reason where they do not run."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from importlib.util import find_spec

import torch

from decoder.model.runtime.capture import first_line

KERNEL_CAPABILITY = (8, 0)


@cache
def triton_installed() -> bool:
    """CUDA builds of PyTorch for Linux bring Triton; CPU builds do not."""
    return find_spec("triton") is not None


def triton_version() -> str:
    """Triton's version; empty where it is not installed."""
    return version("triton") if triton_installed() else ""


@cache
def kernels_refused(device: torch.device) -> str:
    """The reason why our Triton kernels do not run on a GPU, by a trial; empty where they do."""
    if not triton_installed():
        return "Triton is not installed"
    if torch.cuda.get_device_capability(device) < KERNEL_CAPABILITY:
        return "the GPU is older than compute capability 8.0 (Ampere)"
    from decoder.model.runtime import kernels

    try:
        kernels.swiglu(torch.zeros(1, 2, device=device))
    except Exception as error:  # no C compiler or Python.h: Triton's errors have no common class
        return f"Triton does not start ({first_line(error)})"
    return ""
