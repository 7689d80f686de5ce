"""Fits to another tool's forward times, and the profile of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from costmodel.catalog import DeviceFingerprint, find_device, resolve_target
from costmodel.imports.profiles import READERS, TimedModel, check_subject, imported_profile
from costmodel.imports.table import ImportedTable
from costmodel.profile.profile import Profile
from costmodel.profile.schema import PeaksSection
from profiler.report.fits import fit_table


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FitRequest:
    """A file of forward times, what it is of, and what to fit.

    device   slug, name or alias of a known device, or `cpu` for this machine
    context  cached tokens of each request, for a table that does not say them
    source   tool and version that measured, where the file does not say
    """

    path: Path
    format: str
    device: str
    target: str
    tensor_parallel: int = 1
    context: int | None = None
    source: str | None = None


def fit_file(request: FitRequest) -> dict[str, Any]:
    """Errors of all calibrations on the times in the file, as plain values. Raises InputError."""
    table, subject = _read(request)
    check_subject(table, subject, request.path)
    report = fit_table(table.points, subject.roofline(table.weights), path=request.path)
    return report | {
        "device": subject.device.name,
        "target": subject.architecture.name,
        "tensor_parallel": subject.tensor_parallel,
    }


def import_file(request: FitRequest) -> Profile:
    """The profile of the times in the file. Raises InputError."""
    table, subject = _read(request)
    return imported_profile(table, subject, path=request.path, source=request.source)


def _read(request: FitRequest) -> tuple[ImportedTable, TimedModel]:
    architecture = resolve_target(request.target, hub=True).architecture
    known = None if request.device == "cpu" else find_device(request.device)
    table = READERS[request.format](request.path, request.context)
    if known is None:
        device, peaks = _this_cpu(table.threads)
    else:
        device = DeviceFingerprint(kind="cuda", name=known.name, memory_bytes=known.memory_bytes)
        peaks = PeaksSection(
            source="datasheet",
            flops_per_s=known.peak_flops_per_s,
            bytes_per_s=known.peak_bytes_per_s,
        )
    return table, TimedModel(
        device=device,
        peaks=peaks,
        architecture=architecture,
        tensor_parallel=request.tensor_parallel,
    )


def _this_cpu(threads: int | None) -> tuple[DeviceFingerprint, PeaksSection]:
    """This machine's processor and its peaks with so many threads, measured now."""
    import torch

    from decoder.device import fingerprint
    from decoder.profiling.measured_profile import measure_peaks

    before, cpu = torch.get_num_threads(), torch.device("cpu")
    torch.set_num_threads(threads or before)
    try:
        peaks = measure_peaks(cpu, torch.bfloat16)
        return fingerprint(cpu), PeaksSection(
            source="measured",
            flops_per_s=peaks.flops_per_s,
            bytes_per_s=peaks.bytes_per_s,
            measured_flops_per_s=peaks.flops_per_s,
            measured_bytes_per_s=peaks.bytes_per_s,
        )
    finally:
        torch.set_num_threads(before)
