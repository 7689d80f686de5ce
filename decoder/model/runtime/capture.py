"""Capture and replay of device work: CUDA graphs, their memory budget and row buckets."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import inf
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from costmodel.errors import InputError
from decoder.configs import first_reason

WARM_UP_CALLS = 2  # before a capture: compile and choose kernels, allocate workspaces
# Of all rows of a forward; 1025 are those of the largest tree.
BUCKETS = (
    1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1025, 1536, 2048,
)  # fmt: skip

Tensors = tuple[torch.Tensor, ...]


Replay = Callable[[], None]


class CaptureError(RuntimeError):
    """Device work could not be recorded; the work can still be done directly."""


class Capture(ABC):
    """Records device work, under a memory budget that a target and its drafter share.

    A recording counts against the budget for as long as somebody holds it. Tests record on a CPU.

    notes  messages about drafter forwards that could not be captured
    """

    def __init__(self, budget_bytes: float) -> None:
        self.notes: list[str] = []
        self._budget_bytes = budget_bytes
        self._live: WeakKeyDictionary[Replay, int] = WeakKeyDictionary()

    @abstractmethod
    def recorded(self, function: Callable[[], None]) -> Replay:
        """See `record`, whatever the budget."""

    @abstractmethod
    def used_bytes(self) -> int:
        """Device memory in use."""

    @property
    def memory_bytes(self) -> int:
        """Memory of the recordings that are still held."""
        return sum(self._live.values())

    @property
    def unused_bytes(self) -> float:
        """Memory that further recordings may take."""
        return max(self._budget_bytes - self.memory_bytes, 0)

    def record(self, function: Callable[[], None]) -> Replay:
        """Run `function`, which works on fixed tensors; the result repeats its device work.

        Raises CaptureError where that cannot be recorded, and once the budget is used up.
        """
        if not self.unused_bytes:
            raise CaptureError(f"graphs have used their {self._budget_bytes / 1e9:.1f} GB")
        before_bytes = self.used_bytes()
        replay = partial(self.recorded(function))
        self._live[replay] = max(self.used_bytes() - before_bytes, 0)
        return replay


_ONE_CAPTURE = Lock()  # of the process: captures share the allocator


class CudaCapture(Capture):
    """CUDA graphs of one device in one memory pool.

    The pool can be shared: graphs are replayed one after another, and their outputs are
    written to tensors outside the pool.
    """

    def __init__(self, device: torch.device, budget_bytes: float = inf) -> None:
        super().__init__(budget_bytes)
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def recorded(self, function: Callable[[], None]) -> Replay:
        with _ONE_CAPTURE:
            current = torch.cuda.current_stream(self._device)
            try:
                self._stream.wait_stream(current)
                with torch.cuda.stream(self._stream):
                    for _ in range(WARM_UP_CALLS):
                        function()
                current.wait_stream(self._stream)
                torch.cuda.synchronize(self._device)
                graph, mode = torch.cuda.CUDAGraph(), "thread_local"
                where: Any = {"pool": self._pool, "stream": self._stream}
                # What other threads allocate meanwhile does not invalidate it.
                with torch.cuda.graph(graph, **where, capture_error_mode=mode):
                    function()
            except Exception as error:  # Triton's errors, too, derive from Exception alone
                self._abandon(current)
                raise CaptureError(first_reason(error)) from error
            return graph.replay

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

    def used_bytes(self) -> int:
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        return total_bytes - free_bytes


class ChosenTokens:
    """The greedy tokens of a captured forward; their copy to the host begins right behind it."""

    def __init__(self, rows: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._device = torch.zeros(rows, dtype=torch.int64, device=device)
        self._host = torch.zeros(rows, dtype=torch.int64, pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None

    def put(self, tokens: torch.Tensor) -> None:
        """Keep tokens int64 [rows], as part of the captured forward."""
        self._device.copy_(tokens)

    def send(self) -> None:
        """Begin the copy to the host, behind a replay."""
        self._host.copy_(self._device, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def read(self, rows: int) -> NDArray[np.int64]:
        """The tokens of the first rows, int64 [rows]; waits until the copy is there."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host[:rows].numpy().copy()


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
        self._captured: tuple[Tensors, Replay] | None = None
        self.refused: str | None = None

    @torch.inference_mode()
    def __call__(self) -> Tensors:
        if self._captured is None and self.refused is None:
            try:
                outputs = tuple(torch.empty_like(tensor) for tensor in self._function())

                def run() -> None:
                    for static, new in zip(outputs, self._function(), strict=True):
                        static.copy_(new)

                self._captured = outputs, self._capture.record(run)
            except RuntimeError as error:  # torch.OutOfMemoryError is a RuntimeError
                self.refused = first_reason(error)
                logging.getLogger(__name__).warning("running eagerly: %s", self.refused)
        if self._captured is None:
            return self._function()
        outputs, replay = self._captured
        replay()
        return outputs
