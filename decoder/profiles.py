"""Profiles of what this decoder runs: its key for the lookup, and a profile from points."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from platform import python_version
from typing import Any

import torch
import transformers

from costmodel.device import device_by_name
from costmodel.fit import select_calibration
from costmodel.points import Points
from costmodel.profile import CalibrationSection, Profile
from costmodel.registry_key import ProfileKey, SoftKey
from costmodel.roofline import Roofline
from costmodel.schema import (
    ELEMENT_BYTES,
    DeviceSection,
    PeaksSection,
    ProvenanceKind,
    ProvenanceSection,
    RuntimeSection,
    SurfaceSection,
    TargetSection,
)
from decoder.device import dtype_name, fingerprint
from decoder.peaks import measure_copy_bytes_per_s, measure_peaks
from decoder.target import Target

ATTENTION = "split"


def profile_key(target: Target) -> ProfileKey:
    """The hard keys that a profile must share with this decoder."""
    device = fingerprint(target.device)
    return ProfileKey(
        device_name=device.name,
        memory_bytes=device.memory_bytes,
        mig=device.mig,
        threads=device.threads,
        instruction_set=device.instruction_set,
        architecture_hash=target.architecture.hash,
        dtype=dtype_name(target.dtype),
        runtime=target.runtime.kind,
        attention=ATTENTION,
        tensor_parallel=target.ranks.size,
    )


def soft_key(target: Target) -> SoftKey:
    """What may differ from a profile at the price of a warning and online correction."""
    device = fingerprint(target.device)
    return SoftKey(
        driver=device.driver,
        torch=torch.__version__,
        transformers=transformers.__version__,
        cuda=device.cuda,
        power_limit_w=device.power_limit_w,
    )


def runtime_section(target: Target) -> RuntimeSection:
    return RuntimeSection(
        kind=target.runtime.kind,
        dtype=dtype_name(target.dtype),
        attention=ATTENTION,
        tensor_parallel=target.ranks.size,
        buckets=target.runtime.buckets,
        torch=torch.__version__,
        transformers=transformers.__version__,
        python=python_version(),
    )


def find_peaks(target: Target) -> PeaksSection:
    """The measured peaks, and the datasheet's in their place where the device is known.

    Rooflines use the datasheet of a known GPU, so that profiles of one device agree. Ranks
    measure at the same time and take the first one's, so that they plan the same.
    """
    measured = measure_peaks(target.device, target.dtype)
    on_gpu = target.device.type == "cuda"  # where a copy tells how far a read is from the peak
    copy_bytes_per_s = measure_copy_bytes_per_s(target.device) if on_gpu else None
    known = device_by_name(fingerprint(target.device).name)
    # The datasheet's FLOPs are those of bfloat16, so other dtypes use what was measured.
    if known is not None and target.dtype == torch.bfloat16:
        used, source = known.peaks, "datasheet"
    else:
        used, source = measured, "measured"
    section = PeaksSection(
        source=source,
        flops_per_s=used.flops_per_s,
        bytes_per_s=used.bytes_per_s,
        measured_flops_per_s=measured.flops_per_s,
        measured_bytes_per_s=measured.bytes_per_s,
        measured_copy_bytes_per_s=copy_bytes_per_s,
    )
    return target.ranks.decide(lambda: section)


def roofline_of(target: Target, peaks: PeaksSection) -> Roofline:
    return Roofline(
        architecture=target.architecture,
        peaks=peaks.peaks(),
        element_bytes=ELEMENT_BYTES[dtype_name(target.dtype)],
        count="paper",
        tensor_parallel=target.ranks.size,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What a calibration or a probe found, ready to become a profile.

    `provenance` holds the fields of the section that the caller knows (samples,
    duration_s, ...); `sections` the optional sections (stages, drafters, ...).
    """

    kind: ProvenanceKind
    points: Points
    peaks: PeaksSection
    provenance: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, Any] = field(default_factory=dict)


def now_utc() -> str:
    """The time as profiles give it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def weights_note(target: Target) -> str:
    """What to know of the weights: dense forwards take the same time with any.

    And of the devices, where several share them.
    """
    note = f"{target.loaded.weights} weights"
    if target.loaded.weights == "random" and target.architecture.experts:
        note += ", and random routing, which spreads tokens over experts more evenly than real"
    if not target.ranks.alone:
        where = "devices" if target.device.type == "cuda" else "processes on one CPU"
        note += f"; {target.ranks.size} {where}, the interconnect between them not recorded"
    return note


def make_profile(target: Target, measurement: Measurement) -> Profile:
    """Fit the calibrations and put the profile together. Raises InputError, ProfileError."""
    selection = select_calibration(measurement.points, roofline_of(target, measurement.peaks))
    return Profile(
        provenance=ProvenanceSection(
            kind=measurement.kind,
            created_utc=now_utc(),
            tool_version=version("rooftree"),
            points=len(measurement.points),
            note=weights_note(target),
            **measurement.provenance,
        ),
        device=DeviceSection.of(fingerprint(target.device)),
        target=TargetSection.of(target.architecture),
        runtime=runtime_section(target),
        peaks=measurement.peaks,
        calibration=CalibrationSection.of(selection),
        surface=SurfaceSection.of(measurement.points),
        **measurement.sections,
    )
