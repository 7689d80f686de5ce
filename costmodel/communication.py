"""All-reduces of tensor parallelism: protocols with a latency and a rate, by device and degree.

Libraries change the protocol with the size of the message: one-shot exchanges of small ones,
two-shot ones, then NCCL's rings and trees. Within one protocol the time is a line over the bytes.
calibrations/communication.yaml has lines that were fitted to published measurements
(aiconfigurator-core, NVIDIA, Apache-2.0).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.io import read_yaml, shipped_directory

Array = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinkProtocol:
    """Messages of `from_bytes` and more take `latency_s` plus `byte_s` a byte."""

    from_bytes: float
    latency_s: float
    byte_s: float


def all_reduce_s(protocols: Sequence[LinkProtocol], message_bytes: ArrayLike) -> Array:
    """Seconds of one all-reduce of messages [n]; `protocols` ascend from 0 bytes."""
    size = np.asarray(message_bytes, dtype=np.float64)
    starts = np.array([protocol.from_bytes for protocol in protocols])
    index = np.clip(np.searchsorted(starts, size, side="right") - 1, 0, None)
    latency, slope = (
        np.array([getattr(protocol, name) for protocol in protocols])[index]
        for name in ("latency_s", "byte_s")
    )
    return np.asarray(latency + slope * size, dtype=np.float64)


def protocols_of(slug: str, devices: int) -> tuple[LinkProtocol, ...]:
    """The shipped protocols among `devices` of a kind; empty where none were measured."""
    return _shipped().get((slug, devices), ()) if devices > 1 else ()


@cache
def _shipped() -> dict[tuple[str, int], tuple[LinkProtocol, ...]]:
    table = read_yaml(shipped_directory() / "communication.yaml")
    return {
        (slug, devices): tuple(
            LinkProtocol(from_bytes=float(start), latency_s=float(latency_s), byte_s=float(byte_s))
            for start, latency_s, byte_s in rows
        )
        for slug, degrees in table.items()
        for devices, rows in degrees.items()
    }
