"""Capture and replay of device work: CUDA graphs, their memory budget and row buckets.

`Capture` is a protocol, so that tests can run captured forwards on a CPU.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import Protocol
from weakref import WeakSet

import torch

from costmodel.errors import InputError
from decoder.configs import first_reason

WARM_UP_CALLS = 2  # before a capture: compile and choose kernels, allocate workspaces
# Of all rows of a forward; 1025 are those of the largest tree.
BUCKETS = (
    1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1025, 1536, 2048,
)  # fmt: skip

Tensors = tuple[torch.Tensor, ...]


class Capture(Protocol):
    """Records the device work of a function that works on fixed tensors."""

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """Run `function` and return a callable that repeats one call's device work.

        Raises CaptureError where that cannot be recorded.
        """

    def used_bytes(self) -> int:
        """Device memory in use."""


class CaptureError(RuntimeError):
    """Device work could not be recorded; the work can still be done directly."""


class BudgetedCapture:
    """A capture under a memory budget that a target and its drafter share.

    A recording counts against the budget for as long as somebody holds it.

    notes  messages about drafter forwards that could not be captured
    """

    def __init__(self, capture: Capture, budget_bytes: int) -> None:
        self.notes: list[str] = []
        self._capture = capture
        self._budget_bytes = budget_bytes
        self._live: WeakSet[_Recording] = WeakSet()

    @property
    def memory_bytes(self) -> int:
        """Memory of the recordings that are still held."""
        return sum(recording.memory_bytes for recording in self._live)

    @property
    def unused_bytes(self) -> int:
        """Memory that further recordings may take."""
        return max(self._budget_bytes - self.memory_bytes, 0)

    def used_bytes(self) -> int:
        return self._capture.used_bytes()

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """See `Capture.record`. Raises CaptureError, also once the budget is used up."""
        if self.memory_bytes >= self._budget_bytes:
            raise CaptureError(f"graphs have used their {self._budget_bytes / 1e9:.1f} GB")
        before_bytes = self.used_bytes()
        replay = self._capture.record(function)
        recording = _Recording(replay, max(self.used_bytes() - before_bytes, 0))
        self._live.add(recording)
        return recording


class _Recording:
    """A replay and the memory that its recording took."""

    def __init__(self, replay: Callable[[], None], memory_bytes: int) -> None:
        self._replay = replay
        self.memory_bytes = memory_bytes

    def __call__(self) -> None:
        self._replay()


_ONE_CAPTURE = Lock()  # of the process: captures share the allocator


class CudaCapture:
    """CUDA graphs of one device in one memory pool.

    The pool can be shared: graphs are replayed one after another, and their outputs are
    written to tensors outside the pool.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        with _ONE_CAPTURE:
            current = torch.cuda.current_stream(self._device)
            try:
                return self._recorded(function, current)
            except Exception as error:  # Triton's errors, too, derive from Exception alone
                self._abandon(current)
                raise CaptureError(first_reason(error)) from error

    def _abandon(self, current: torch.cuda.Stream) -> None:
        """Leave a failed capture, whose end may itself have failed before it put things back."""
        torch.cuda.set_stream(current)
        device = torch.cuda.current_device()
        with suppress(RuntimeError):  # where the capture's end did this
            torch._C._cuda_endAllocateToPool(device, self._pool)
        random = torch.cuda.default_generators[device]  # whose state may still be that of a capture
        fresh = torch.Generator(self._device).manual_seed(random.initial_seed())
        random.graphsafe_set_state(fresh.graphsafe_get_state())
        self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()  # frees what the failed capture still holds

    def _recorded(
        self, function: Callable[[], None], current: torch.cuda.Stream
    ) -> Callable[[], None]:
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP_CALLS):
                function()
        current.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):  # what other threads allocate meanwhile does not invalidate it
            function()
        return graph.replay

    def used_bytes(self) -> int:
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        return total_bytes - free_bytes


def bucket(rows: int) -> int | None:
    """The padded row count of a forward of `rows` rows; None beyond the largest bucket.

    A batch's rows lie end to end and are padded together, whatever each sequence has, so that few
    shapes serve a batch whose texts end one by one. Raises InputError for less than one row.
    """
    if rows < 1:
        raise InputError(f"a forward needs one row or more, not {rows}")
    index = bisect_left(BUCKETS, rows)
    return BUCKETS[index] if index < len(BUCKETS) else None


class GraphedFunction:
    """A function that reads fixed tensors, captured at its first call and then replayed.

    Python values that it uses must not change: a cache's length is read from a tensor. It may
    write tensors in place if writing twice gives the same result, since a capture runs it several
    times. The returned tensors are static: the next call overwrites them. A function that cannot
    be captured is called directly, and `refused` holds the reason.
    """

    def __init__(self, function: Callable[[], Tensors], capture: Capture) -> None:
        self._function, self._capture = function, capture
        self._captured: tuple[Tensors, Callable[[], None]] | None = None
        self.refused: str | None = None

    @torch.inference_mode()
    def __call__(self) -> Tensors:
        if self._captured is None and self.refused is None:
            try:
                self._captured = self._record()
            except RuntimeError as error:  # torch.OutOfMemoryError is a RuntimeError
                self.refused = first_reason(error)
                logging.getLogger(__name__).warning("running eagerly: %s", self.refused)
        if self._captured is None:
            return self._function()
        outputs, replay = self._captured
        replay()
        return outputs

    def _record(self) -> tuple[Tensors, Callable[[], None]]:
        outputs = tuple(torch.empty_like(tensor) for tensor in self._function())

        def run() -> None:
            for static, new in zip(outputs, self._function(), strict=True):
                static.copy_(new)

        return outputs, self._capture.record(run)
