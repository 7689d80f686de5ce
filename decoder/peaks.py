"""The peaks this device really reaches: a large matrix product and a large read."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

from costmodel.device import Peaks
from decoder.device import synchronise

READ_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}  # several times any last-level cache
MATRIX_SIZE = {"cpu": 1024, "cuda": 8192}
REPEATS = 5


def measure_peaks(device: torch.device, dtype: torch.dtype) -> Peaks:
    """Best of a few runs each, since a peak is a bound: FLOPs/s of a square matrix
    product in `dtype`, and bytes/s of reading a buffer once (a sum)."""
    size = MATRIX_SIZE[device.type]
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    # float32 sums: the fastest plain read torch has on a CPU.
    buffer = torch.ones(READ_BYTES[device.type] // 4, dtype=torch.float32, device=device)
    with torch.inference_mode():
        product_s = _best_s(lambda: torch.mm(left, right), device)
        read_s = _best_s(lambda: buffer.sum(), device)
    return Peaks(flops_per_s=2.0 * size**3 / product_s, bytes_per_s=buffer.numel() * 4 / read_s)


def _best_s(function: Callable[[], object], device: torch.device) -> float:
    function()
    times = []
    for _ in range(REPEATS):
        synchronise(device)
        start = perf_counter()
        function()
        synchronise(device)
        times.append(perf_counter() - start)
    return min(times)
