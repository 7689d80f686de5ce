"""The device as numbers: peaks, memory and what identifies it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from costmodel.errors import DeviceError, InputError
from costmodel.files import input_yaml, shipped_directory


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """What the device can do at best, from a data sheet or measured."""

    flops_per_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        for field in ("flops_per_s", "bytes_per_s"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise InputError(f"{field} must be a number (is {value!r})")
            if not 0 < value < float("inf"):
                raise InputError(f"{field} must be a finite number above 0 (is {value!r})")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """A device in devices.yaml. Peak FLOP rates are dense; `fp8` is None where it has none."""

    slug: str
    name: str
    peak_flops_per_s: float
    peak_bytes_per_s: float
    memory_bytes: int
    l2_bytes: int
    sm_count: int
    tdp_w: float
    confidence: Literal["corroborated", "recalled"]
    note: str = ""
    fp8_flops_per_s: float | None = None

    @property
    def peaks(self) -> Peaks:
        """The dense bf16 rate and the memory bandwidth."""
        return Peaks(flops_per_s=self.peak_flops_per_s, bytes_per_s=self.peak_bytes_per_s)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFingerprint:
    """The device that is here, as the runtime reports it.

    `mig` names a MIG slice; `threads` and `instruction_set` are for a CPU. None: not known
    or not applicable.
    """

    kind: Literal["cuda", "cpu"]
    name: str
    memory_bytes: int
    mig: str | None = None
    threads: int | None = None
    instruction_set: str | None = None
    driver: str | None = None
    cuda: str | None = None
    power_limit_w: float | None = None

    @property
    def slug(self) -> str:
        """The name of this device's folder of profiles."""
        return device_slug(self.name)


def slugify(text: str) -> str:
    """Lower case, runs of anything but letters, digits, `.` and `_` become one `-`."""
    slug = re.sub(r"[^a-z0-9._]+", "-", text.lower()).strip("-.")
    return slug[:80] or "unnamed"


def device_slug(name: str) -> str:
    """The slug of a known device, or one made from the name that the device reports."""
    spec = device_by_name(name)
    return spec.slug if spec else slugify(name)


def load_devices(path: Path | None = None) -> dict[str, DeviceSpec]:
    """All known devices by slug, from the shipped file or `path`. Raises InputError."""
    if path is None:
        return dict(_shipped_devices())
    table = input_yaml(path)
    if not isinstance(table, Mapping) or not table:
        raise InputError(f"{path}: must map device slugs to their figures")
    devices = {str(slug): _spec(path, str(slug), row) for slug, row in table.items()}
    names = [spec.name for spec in devices.values()]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise InputError(f"{path}: two slugs have the name '{doubled[0]}'")
    return devices


@cache
def _shipped_devices() -> dict[str, DeviceSpec]:
    return load_devices(shipped_directory() / "devices.yaml")


@cache
def _by_name() -> dict[str, DeviceSpec]:
    return {spec.name: spec for spec in _shipped_devices().values()}


def device_by_name(name: str) -> DeviceSpec | None:
    """The device with exactly this NVML name, or None."""
    return _by_name().get(name)


def find_device(query: str) -> DeviceSpec:
    """A known device by slug, by NVML name, or by a part of either that fits only one.

    Raises DeviceError where none or several fit.
    """
    devices = _shipped_devices()
    wanted = query.strip().lower()
    for spec in devices.values():
        if wanted in (spec.slug, spec.name.lower()):
            return spec
    part = slugify(wanted)
    fits = [
        spec
        for spec in devices.values()
        if wanted and (part in spec.slug or part in slugify(spec.name))
    ]
    if len(fits) == 1:
        return fits[0]
    names = ", ".join(spec.slug for spec in (fits or devices.values()))
    if fits:
        raise DeviceError(f"the device '{query}' is ambiguous", hint=f"Use one of: {names}")
    raise DeviceError(f"no known device is called '{query}'", hint=f"Known devices: {names}")


def _spec(path: Path, slug: str, row: Any) -> DeviceSpec:
    if not isinstance(row, Mapping):
        raise InputError(f"{path}: {slug}: must be a mapping of figures")
    if slug != slugify(slug):
        raise InputError(f"{path}: {slug}: a slug has small letters, digits and '-' only")
    try:
        fp8 = row.get("fp8_tflops")
        return DeviceSpec(
            slug=slug,
            name=str(row["name"]),
            peak_flops_per_s=_number(row, "bf16_tflops") * 1e12,
            peak_bytes_per_s=_number(row, "memory_gb_per_s") * 1e9,
            memory_bytes=int(_number(row, "memory_gib") * 2**30),
            l2_bytes=int(_number(row, "l2_mib") * 2**20),
            sm_count=int(_number(row, "sm_count")),
            tdp_w=_number(row, "tdp_w"),
            confidence=_confidence(row),
            note=str(row.get("note", "")),
            fp8_flops_per_s=None if fp8 is None else _number(row, "fp8_tflops") * 1e12,
        )
    except KeyError as failure:
        raise InputError(f"{path}: {slug}: the field {failure} is missing") from None
    except InputError as failure:
        raise InputError(f"{path}: {slug}: {failure.problem}") from None


def _number(row: Mapping[str, Any], field: str) -> float:
    value = row[field]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{field} must be a number (is {value!r})")
    if not 0 < value < float("inf"):
        raise InputError(f"{field} must be a finite number above 0 (is {value!r})")
    return float(value)


def _confidence(row: Mapping[str, Any]) -> Literal["corroborated", "recalled"]:
    value = row["confidence"]
    if value == "corroborated":
        return "corroborated"
    if value == "recalled":
        return "recalled"
    raise InputError(f"confidence must be corroborated or recalled (is {value!r})")
