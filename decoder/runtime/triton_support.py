"""Whether our Triton kernels can run; none of them is imported where they cannot."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch


@cache
def triton_installed() -> bool:
    """CUDA builds of PyTorch for Linux bring Triton with them; CPU builds do not."""
    return find_spec("triton") is not None


def kernels_usable(device: torch.device) -> bool:
    """Whether kernels are compiled for the device; never in Triton's interpreter."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return device.type == "cuda" and triton_installed() and not interpreted
