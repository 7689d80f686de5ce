"""A timer of CUDA events, from a cold L2 cache."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch

L2_BYTES = 128 << 20  # of a device that does not tell: more than any has now


class CudaTimer:
    """CUDA events on the current stream of `device`, the device idle before the first one.

    The first event is recorded on an idle stream, so the time between the events holds the
    host's launch work too wherever the device has to wait for it: that is what a decoder pays.
    Before it the L2 cache is filled with something else, since a call that is repeated would
    find there what a decoder has to read from memory.
    """

    def __init__(
        self,
        device: Any = None,
        cuda: Any = None,
        flush: Callable[[], object] | None = None,
    ) -> None:
        """cuda, flush: `torch.cuda` and what empties the L2 cache, or what stands in for them."""
        self._cuda = torch.cuda if cuda is None else cuda
        self._device = device
        self._flush = l2_flush(device) if flush is None else flush
        with self._cuda.device(device):
            self._start = self._cuda.Event(enable_timing=True)
            self._end = self._cuda.Event(enable_timing=True)

    def time_s(self, function: Callable[[], object]) -> float:
        collecting = gc.isenabled()
        gc.disable()
        try:
            self._flush()
            self._cuda.synchronize(self._device)
            stream = self._cuda.current_stream(self._device)
            self._start.record(stream)
            function()
            self._end.record(stream)
            self._end.synchronize()
        finally:
            if collecting:
                gc.enable()
        return float(self._start.elapsed_time(self._end)) / 1e3

    def now_s(self) -> float:
        return time.perf_counter()


def l2_flush(device: Any) -> Callable[[], object]:
    """A function that writes twice the L2 cache's size on a CUDA device."""
    properties = torch.cuda.get_device_properties(device)
    cache_bytes = int(getattr(properties, "L2_cache_size", 0)) or L2_BYTES
    scratch = torch.empty(2 * cache_bytes, dtype=torch.uint8, device=device or "cuda")
    return scratch.zero_
