"""Recording device work once and replaying it, behind a protocol that tests can stand in for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

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
