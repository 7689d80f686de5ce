"""Memory of the points of a sweep: estimates before a point, and running out at its first call."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import torch

from costmodel.architecture import ModelArchitecture
from costmodel.errors import DeviceError, MeasurementError
from decoder.model.ranks import ALONE, Ranks
from decoder.model.target import Target

# The share of free memory that a KV cache may take. Activations, captured forwards and the
# allocator's fragmentation need the rest.
CACHE_SHARE = 0.8
SPLIT_PARTS = 9  # float32 outputs of key ranges that tree attention merges at many rows


class OutOfMemory(MeasurementError):
    """The memory did not suffice for a point, against the estimate."""


def free_memory(device: torch.device, ranks: Ranks = ALONE) -> Callable[[], int]:
    """A function that returns the free bytes of a device, the allocator's reserve included.

    Of several ranks' devices it is the least, so that all skip the same points. Ranks on one
    CPU share its memory equally.
    """
    if device.type == "cpu":
        return lambda: int(ranks.least(psutil.virtual_memory().available // ranks.size))

    def free_bytes() -> int:
        driver_bytes, _ = torch.cuda.mem_get_info(device)
        unused_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(ranks.least(driver_bytes + unused_bytes))

    return free_bytes


def slot_bytes(architecture: ModelArchitecture, sequences: int, element_bytes: int) -> int:
    """Bytes of one token in the KV caches of all sequences."""
    width = architecture.kv_heads * architecture.head_dim
    return 2 * architecture.layers * sequences * width * element_bytes


def forward_bytes(architecture: ModelArchitecture, rows: int, element_bytes: int) -> int:
    """An upper estimate of a forward's memory beside weights and cache.

    It counts the logits twice (as computed, and where they are kept), the widest activations
    of one layer, and the partial outputs of tree attention.
    """
    heads = architecture.heads * architecture.head_dim
    widest = 4 * architecture.hidden + 3 * max(architecture.ffn, heads)
    per_row = element_bytes * (2 * architecture.vocab + widest) + 4 * SPLIT_PARTS * heads
    return rows * per_row


class Rehearsed:
    """A call of the target that each rank tries alone before all ranks make it together.

    Where the memory of one rank does not suffice, all of them learn it, and none waits in a
    collective for the others. A shortage in a later call ends the run.
    """

    def __init__(self, run: Callable[[], object], target: Target) -> None:
        """run: raises OutOfMemory where the memory does not suffice."""
        self._run, self._target = run, target
        self._tried = False

    def __call__(self) -> object:
        if not self._tried:
            self._rehearse()
        try:
            return self._run()
        except OutOfMemory as error:
            raise DeviceError(
                f"{error.problem}, in a forward that other processes had begun",
                hint="Choose smaller --contexts, --max-nodes or --batch.",
            ) from error

    def _rehearse(self) -> None:
        reason = ""
        try:
            with self._target.rehearsal():
                self._run()
        except OutOfMemory as error:
            reason = error.problem
        reason = self._target.ranks.any_text(reason)
        if reason:
            raise OutOfMemory(reason)
        self._tried = True
