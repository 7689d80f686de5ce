"""Recording device work once and replaying it, behind a protocol that tests can stand in for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet

import torch

from decoder.parallel import ALONE, Ranks

WARM_UP_CALLS = 2  # kernels are compiled and chosen, and workspaces allocated, before capture


class Capture(Protocol):
    """Turns a function that works on fixed tensors into a replay of its device work."""

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """Run `function`, and return what repeats the work of one call.

        Raises RuntimeError (torch.OutOfMemoryError among them) where it cannot be recorded.
        """

    def used_bytes(self) -> int:
        """Memory of the device in use."""


class BudgetSpent(RuntimeError):
    """What is captured has used the memory that it may use."""


class BudgetedCapture:
    """A capture within a memory budget, which a target and its drafter share.

    What a recording took is free again when nobody holds the recording any more.

    notes  what could not be captured beside the target's forwards, in words
    """

    def __init__(self, capture: Capture, budget_bytes: int) -> None:
        self.notes: list[str] = []
        self._capture = capture
        self._budget_bytes = budget_bytes
        self._live: WeakSet[_Recording] = WeakSet()

    @property
    def memory_bytes(self) -> int:
        """What the recordings have taken."""
        return sum(recording.memory_bytes for recording in self._live)

    def used_bytes(self) -> int:
        return self._capture.used_bytes()

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """As `Capture.record`; raises BudgetSpent once the budget has been reached."""
        if self.memory_bytes >= self._budget_bytes:
            raise BudgetSpent(f"graphs have used their {self._budget_bytes / 1e9:.1f} GB")
        before_bytes = self.used_bytes()
        replay = self._capture.record(function)
        recording = _Recording(replay, max(self.used_bytes() - before_bytes, 0))
        self._live.add(recording)
        return recording


class _Recording:
    """Captured work, and the memory that it took."""

    def __init__(self, replay: Callable[[], None], memory_bytes: int) -> None:
        self._replay = replay
        self.memory_bytes = memory_bytes

    def __call__(self) -> None:
        self._replay()


class CudaCapture:
    """CUDA graphs of one device, which share one memory pool.

    Sharing is sound because graphs are replayed one after another and keep nothing in the
    pool that is read after another's replay: outputs are written to tensors outside it.
    Until a graph is replayed nothing is sent to other ranks, so that each may fail by itself.
    """

    def __init__(self, device: torch.device, ranks: Ranks = ALONE) -> None:
        self._device = device
        self._ranks = ranks
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), self._ranks.muted():
            for _ in range(WARM_UP_CALLS):
                function()
        current.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                function()
        except RuntimeError:
            torch.cuda.empty_cache()  # what the failed capture holds would be missed elsewhere
            raise
        return graph.replay

    def used_bytes(self) -> int:
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        return total_bytes - free_bytes
