"""Timers: by the wall clock, and by CUDA events."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

L2_BYTES = 128 << 20  # assumed where the device does not report its L2 cache; above all known sizes


class Timer(Protocol):
    """Times calls on one device, and gives the time for budgets."""

    def time_s(self, function: Callable[[], object]) -> float:
        """Seconds of one call of `function`, until its work on the device is done."""
        ...

    def now_s(self) -> float:
        """Seconds of a monotonic clock."""
        ...


class WallTimer:
    """`time.perf_counter` around the call, with the garbage collector off."""

    def time_s(self, function: Callable[[], object]) -> float:
        with _without_garbage_collection():
            start_s = time.perf_counter()
            function()
            return time.perf_counter() - start_s

    def now_s(self) -> float:
        return time.perf_counter()


class CudaTimer:
    """CUDA events on the current stream of `device`, from an idle device and a cold L2 cache.

    The device is idle when the first event is recorded. The time between the events therefore
    includes the host's launch work wherever the device waits for it, as it does in decoding.
    The L2 cache is overwritten before each sample: a repeated call would otherwise read from
    the cache what a decoder reads from memory.
    """

    def __init__(
        self,
        device: Any = None,
        cuda: Any = None,
        flush: Callable[[], object] | None = None,
    ) -> None:
        """
        cuda   replaces `torch.cuda` in tests
        flush  replaces the function that overwrites the L2 cache
        """
        self._cuda = torch.cuda if cuda is None else cuda
        self._device = device
        self._flush = l2_flush(device) if flush is None else flush
        with self._cuda.device(device):
            self._start = self._cuda.Event(enable_timing=True)
            self._end = self._cuda.Event(enable_timing=True)

    def time_s(self, function: Callable[[], object]) -> float:
        with _without_garbage_collection():
            self._flush()
            self._cuda.synchronize(self._device)
            stream = self._cuda.current_stream(self._device)
            self._start.record(stream)
            function()
            self._end.record(stream)
            self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1e3

    def now_s(self) -> float:
        return time.perf_counter()


class ReportTimer:
    """For functions that time the part of them that counts, and return its seconds."""

    def time_s(self, function: Callable[[], Any]) -> float:
        with _without_garbage_collection():
            return float(function())

    def now_s(self) -> float:
        return time.perf_counter()


def l2_flush(device: Any) -> Callable[[], object]:
    """A function that writes twice the L2 cache's size on a CUDA device."""
    properties = torch.cuda.get_device_properties(device)
    cache_bytes = int(getattr(properties, "L2_cache_size", 0)) or L2_BYTES
    scratch = torch.empty(2 * cache_bytes, dtype=torch.uint8, device=device or "cuda")
    return scratch.zero_


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
