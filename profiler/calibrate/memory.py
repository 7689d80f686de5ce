"""Memory of the points of a sweep: estimates before a point, and running out at its first call."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import torch

from costmodel.architecture import ModelArchitecture
from costmodel.errors import MeasurementError

# The share of free memory that a KV cache may take. Activations, captured forwards and the
# allocator's fragmentation need the rest.
CACHE_SHARE = 0.8
SPLIT_PARTS = 9  # float32 outputs of key ranges that tree attention merges at many rows


class OutOfMemory(MeasurementError):
    """The memory did not suffice for a point, against the estimate."""


def free_memory(device: torch.device) -> Callable[[], int]:
    """A function that returns the free bytes of a device, the allocator's reserve included."""
    if device.type == "cpu":
        return lambda: int(psutil.virtual_memory().available)

    def free_bytes() -> int:
        driver_bytes, _ = torch.cuda.mem_get_info(device)
        unused_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(driver_bytes + unused_bytes)

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
