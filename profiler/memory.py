"""Whether a point fits into memory, asked before it is measured."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import torch

from costmodel.architecture import ModelArchitecture
from costmodel.errors import MeasurementError
from decoder.parallel import ALONE, Ranks

# Of the free memory, what a KV cache may take: activations, captured forwards and the
# allocator's own losses need the rest.
CACHE_SHARE = 0.8
SPLIT_PARTS = 9  # float32 outputs of parts of the keys that tree attention merges, at many rows


class OutOfMemory(MeasurementError):
    """A point for which the memory did not suffice after all."""


def free_memory(device: torch.device, ranks: Ranks = ALONE) -> Callable[[], int]:
    """A function that tells the free bytes of a device, the allocator's own reserve included.

    Of the ranks' devices, those of the one with least, so that all leave out the same points;
    on one CPU each may count on its share.
    """
    if device.type == "cpu":
        return lambda: int(ranks.least(psutil.virtual_memory().available // ranks.size))

    def free_bytes() -> int:
        driver_bytes, _ = torch.cuda.mem_get_info(device)
        unused_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(ranks.least(driver_bytes + unused_bytes))

    return free_bytes


def slot_bytes(architecture: ModelArchitecture, sequences: int, element_bytes: int) -> int:
    """Bytes that one token more takes in the KV caches of all sequences."""
    width = architecture.kv_heads * architecture.head_dim
    return 2 * architecture.layers * sequences * width * element_bytes


def forward_bytes(architecture: ModelArchitecture, rows: int, element_bytes: int) -> int:
    """An upper estimate of what a forward of so many rows takes beside weights and cache.

    Logits twice (as computed, and where they are kept), the widest activations of one layer,
    and the parts of tree attention.
    """
    heads = architecture.heads * architecture.head_dim
    widest = 4 * architecture.hidden + 3 * max(architecture.ffn, heads)
    per_row = element_bytes * (2 * architecture.vocab + widest) + 4 * SPLIT_PARTS * heads
    return rows * per_row
