"""The peaks this device really reaches: a large matrix product, a large read and a copy."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

from costmodel.device import Peaks
from decoder.device import synchronise

READ_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}  # several times any last-level cache
MATRIX_SIZE = {"cpu": 1024, "cuda": 8192}
REPEATS = 5
# Calls between two looks at the clock: launching and waiting once costs a GPU 1 % of one.
CALLS = {"cpu": 1, "cuda": 10}
MEMORY_SHARE = 8  # of the free memory of a GPU, one part in so many is read


def measure_peaks(device: torch.device, dtype: torch.dtype) -> Peaks:
    """Best of a few runs each, since a peak is a bound: FLOPs/s of a square matrix
    product in `dtype`, and bytes/s of reading a buffer once (a sum)."""
    size = MATRIX_SIZE[device.type]
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    buffer = _buffer(device)
    with torch.inference_mode():
        product_s = _best_s(lambda: torch.mm(left, right), device)
        read_s = _best_s(lambda: buffer.sum(), device)
    return Peaks(flops_per_s=2.0 * size**3 / product_s, bytes_per_s=buffer.nbytes / read_s)


def measure_copy_bytes_per_s(device: torch.device) -> float:
    """Bytes/s of copying one half of a buffer to the other, read and written ones counted."""
    buffer = _buffer(device)
    half, other = buffer.chunk(2)
    with torch.inference_mode():
        return buffer.nbytes / _best_s(lambda: half.copy_(other), device)


def _buffer(device: torch.device) -> torch.Tensor:
    """An even number of float32 ones, whose sum is the fastest plain read torch has on a CPU."""
    wanted_bytes = READ_BYTES[device.type]
    if device.type == "cuda":  # a model may have left little memory
        free_bytes, _ = torch.cuda.mem_get_info(device)
        wanted_bytes = min(wanted_bytes, free_bytes // MEMORY_SHARE)
    return torch.ones(wanted_bytes // 8 * 2, dtype=torch.float32, device=device)


def _best_s(function: Callable[[], object], device: torch.device) -> float:
    """Least seconds of one call, over a few rounds of several."""
    function()
    times, calls = [], CALLS[device.type]
    for _ in range(REPEATS):
        synchronise(device)
        start = perf_counter()
        for _ in range(calls):
            function()
        synchronise(device)
        times.append((perf_counter() - start) / calls)
    return min(times)
