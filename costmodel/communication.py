"""All-reduces of tensor parallelism: protocols with a latency and a rate, by device and degree.

Libraries change the protocol with the size of the message: one-shot exchanges of small ones,
two-shot ones, then NCCL's rings and trees. Within one protocol the time is a line over the bytes.
calibrations/communication.yaml has lines that were fitted to published measurements
(aiconfigurator-core, NVIDIA, Apache-2.0).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.errors import InputError
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
    return load_protocols(shipped_directory() / "communication.yaml")


def load_protocols(path: Path) -> dict[tuple[str, int], tuple[LinkProtocol, ...]]:
    """Protocols by device and degree from a YAML file. Raises InputError."""
    table = read_yaml(path)
    if not isinstance(table, Mapping):
        raise InputError(f"{path}: must map device slugs to degrees")
    protocols: dict[tuple[str, int], tuple[LinkProtocol, ...]] = {}
    for slug, degrees in table.items():
        if not isinstance(degrees, Mapping):
            raise InputError(f"{path}: {slug}: must map numbers of devices to protocols")
        for devices, rows in degrees.items():
            if not isinstance(devices, int) or not isinstance(rows, list) or not rows:
                raise InputError(f"{path}: {slug}: must map numbers of devices to protocols")
            protocols[str(slug), devices] = tuple(_protocol(path, slug, row) for row in rows)
    return protocols


def _protocol(path: Path, slug: Any, row: Any) -> LinkProtocol:
    try:
        start, latency_s, byte_s = (float(value) for value in row)
    except (TypeError, ValueError):
        raise InputError(
            f"{path}: {slug}: a protocol is [bytes, latency, seconds a byte] (is {row!r})"
        ) from None
    if not (0 <= start < 1e12 and 0 <= latency_s < 1 and 0 <= byte_s < 1e-3):
        raise InputError(f"{path}: {slug}: a protocol is out of range (is {row!r})")
    return LinkProtocol(from_bytes=start, latency_s=latency_s, byte_s=byte_s)
