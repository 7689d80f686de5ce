"""Fits to another tool's forward times, and the profile of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from costmodel.calibration.choices import regret_at_contexts
from costmodel.calibration.linear import LinearCalibration
from costmodel.calibration.physical import COEFFICIENTS, KernelShape, PhysicalCalibration
from costmodel.calibration.points import CALIBRATIONS, Points
from costmodel.calibration.selection import Selection, select_calibration
from costmodel.catalog import DeviceFingerprint, DeviceSpec, find_device, resolve_target
from costmodel.imports import ImportedTable, TimedModel, check_subject, check_times, read_times
from costmodel.profile.schema import PeaksSection
from costmodel.statistics import Array


def listed_device(spec: DeviceSpec) -> tuple[DeviceFingerprint, PeaksSection]:
    """A known GPU and the peaks of its datasheet."""
    device = DeviceFingerprint(kind="cuda", name=spec.name, memory_bytes=spec.memory_bytes)
    flops_per_s, bytes_per_s = spec.peak_flops_per_s, spec.peak_bytes_per_s
    peaks = PeaksSection(source="datasheet", flops_per_s=flops_per_s, bytes_per_s=bytes_per_s)
    return device, peaks


def read_file(
    path: Path, format: str, *, device: str, target: str, tensor_parallel: int, context: int | None
) -> tuple[ImportedTable, TimedModel]:
    """The table in a file and its subject; of a CPU the peaks are this machine's, measured now.

    device   slug, name or alias of a known device, or `cpu` for this machine
    context  cached tokens of each request, for a table that does not say them

    Peaks are measured in the table's threads and dtype. Products in float32 bound those in a dtype
    that the processor has to convert. Raises InputError.
    """
    architecture = resolve_target(target, hub=True).architecture
    known = None if device == "cpu" else find_device(device)
    table = read_times(format, path, context)
    if known is not None:
        here, peaks = listed_device(known)
    else:
        import torch

        from decoder.device import fingerprint
        from decoder.profiling.measured_profile import measure_peaks

        before, cpu = torch.get_num_threads(), torch.device("cpu")
        torch.set_num_threads(table.threads or before)
        dtypes = {"float32", table.dtype}
        try:
            found = [measure_peaks(cpu, getattr(torch, name)) for name in dtypes]
            best, here = max(found, key=lambda one: one.flops_per_s), fingerprint(cpu)
        finally:
            torch.set_num_threads(before)
        peaks = PeaksSection(
            source="measured",
            flops_per_s=best.flops_per_s,
            bytes_per_s=best.bytes_per_s,
            measured_flops_per_s=best.flops_per_s,
            measured_bytes_per_s=best.bytes_per_s,
        )
    return table, TimedModel(
        device=here, peaks=peaks, architecture=architecture, tensor_parallel=tensor_parallel
    )


def fit_table(table: ImportedTable, subject: TimedModel, path: Path) -> dict[str, Any]:
    """Errors of all calibrations on the times of `path`, by cross-validation. Raises InputError."""
    check_subject(table, subject, path)
    points, roofline = table.points, subject.roofline(table)
    warning = check_times(points, roofline, path)
    report: dict[str, Any] = {"warning": warning} if warning else {}
    selection, calibrations = select_calibration(points, roofline), {}
    for name in CALIBRATIONS:
        if name in selection.cross_validated:
            held_out = left_out_error(points, selection.predicted_left_out_s[name])
            calibrations[name] = {"held_out": held_out, **coefficients(selection, name)}
    return report | {
        "points": len(points),
        "fitted": len(points),
        "selected": selection.selected,
        "calibrations": calibrations,
        "device": subject.device.name,
        "target": subject.architecture.name,
        "tensor_parallel": subject.tensor_parallel,
    }


def left_out_error(points: Points, predicted_s: Array) -> dict[str, Any]:
    """Relative errors with equal weight for each row count, and the regret of each context.

    predicted_s  [points], each from a fit to the others
    """
    error = np.abs(predicted_s / points.seconds - 1)
    _, inverse, counts = np.unique(points.rows, return_inverse=True, return_counts=True)
    weight = 1 / counts[inverse] / len(counts)
    order = np.argsort(error)
    reached = np.searchsorted(np.cumsum(weight[order]), 0.95 - 1e-12)
    regret = regret_at_contexts(points, predicted_s)
    return {
        "points": len(points),
        "row_counts": len(counts),
        "mape": float(np.sum(weight * error)),
        "p95": float(error[order][min(int(reached), len(error) - 1)]),
        "worst": float(np.max(error)),
        "mape_of_points": float(np.mean(error)),
        "p95_of_points": float(np.quantile(error, 0.95)),
        "regret": None if regret is None else regret.mean,
        "regret_worst": None if regret is None else regret.worst,
    }


def coefficients(selection: Selection, name: str) -> dict[str, Any]:
    """Coefficients and standard errors of a calibration that is a formula; empty for others."""
    fitted = selection.fitted()[name]
    if isinstance(fitted, LinearCalibration):
        names = ("slope", "intercept_s", "slope_se", "intercept_se_s")
        return {"coefficients": {field: getattr(fitted, field) for field in names}}
    if isinstance(fitted, PhysicalCalibration):
        values = dict(zip(COEFFICIENTS, fitted.coefficients, strict=True))
        errors = {name: getattr(fitted, f"{name}_se") for name in COEFFICIENTS}
        shape = {name: getattr(fitted, name) for name in (*KernelShape._fields, "communication")}
        intervals = {"intervals_95": fitted.intervals(), "standard_errors": errors}
        return {"coefficients": values | shape | intervals}
    return {}
