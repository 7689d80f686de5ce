"""Profiles made from another tool's forward times, and checks that these are what is claimed."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import numpy as np

from costmodel.architecture import ModelArchitecture
from costmodel.calibration.design import design_points
from costmodel.calibration.points import ErrorSummary, Points
from costmodel.calibration.selection import select_calibration
from costmodel.catalog import DeviceFingerprint, device_slug, find_device, protocols_of
from costmodel.errors import InputError
from costmodel.imports.table import ImportedTable, WeightFormat, read_csv
from costmodel.io import now_utc, tool_version
from costmodel.plugins import READERS, load_plugin
from costmodel.profile import schema
from costmodel.profile.profile import Profile
from costmodel.roofline import Roofline

# Points of larger tables that a profile is fitted to; all others are held out.
MOST_FITTED = 120
# Medians of measured times over the physical roofline: a wrong unit is far outside.
_TOO_FAST, _VERY_SLOW, _SLOW_ON_CPU = 0.5, 300.0, 10.0
# A converter may leave out or repeat an embedding, never more.
_PARAMETER_TOLERANCE = 0.25


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TimedModel:
    """The device and target that the times are of."""

    device: DeviceFingerprint
    peaks: schema.PeaksSection
    architecture: ModelArchitecture
    tensor_parallel: int = 1

    def roofline(self, weights: WeightFormat | None = None) -> Roofline:
        weights = weights or WeightFormat()
        return Roofline(
            architecture=self.architecture,
            peaks=self.peaks.peaks(),
            element_bytes=schema.ELEMENT_BYTES[weights.dtype],
            weight_bytes=weights.weight_bytes,
            head_bytes=weights.weight_bytes,  # a mean over all
            tensor_parallel=self.tensor_parallel,
            protocols=protocols_of(self.device.slug, self.tensor_parallel),
        )


def read_times(name: str, path: Path, context: int | None = None) -> ImportedTable:
    """The forward times in a file: a CSV, or the format of an entry point `times.NAME`.

    context  cached tokens of each request, where the file does not say it
    Raises InputError.
    """
    reader = read_csv if name == "csv" else load_plugin(READERS, name, "times.", ("csv",))
    table: ImportedTable = reader(path, context)
    return table


def check_times(points: Points, roofline: Roofline, path: Path, *, on_cpu: bool = False) -> str:
    """A warning for times that are very long for the device; empty where they are not.

    A median below half the physical roofline, or above 300 times it, comes more often from a wrong
    unit, device or target than from a measurement; above 10 times it on a CPU, which waits for no
    host. Raises InputError for impossible times.
    """
    bound = roofline.with_count("physical")
    ratio = float(
        np.median(points.seconds / bound.seconds(points.rows, points.context, points.batch))
    )
    if ratio < _TOO_FAST:
        raise InputError(
            f"the times in {path} are {1 / ratio:.3g} times faster than this device can be",
            hint="Check the unit of the times, --device, --target and --tp",
        )
    if ratio > (_SLOW_ON_CPU if on_cpu else _VERY_SLOW):
        return f"times are {ratio:.3g} times the physical bound, as by a wrong unit or device"
    return ""


def check_subject(table: ImportedTable, subject: TimedModel, path: Path) -> None:
    """Raise InputError where the file names another device, or a model of another size."""
    device = subject.device
    on_cpu = table.threads is not None
    slug = device_slug(table.processor) if on_cpu and table.processor else None
    if table.processor and not on_cpu:
        with contextlib.suppress(InputError):  # a GPU that is not known
            slug = find_device(table.processor).slug
    if (slug is not None and slug != device.slug) or (on_cpu and device.kind != "cpu"):
        raise InputError(
            f"{path} was measured on {table.processor}, not on {device.name}",
            hint="Run this on that machine, with --device cpu" if on_cpu else "Check --device",
        )
    wanted = subject.architecture.parameters
    if table.parameters and abs(table.parameters / wanted - 1) > _PARAMETER_TOLERANCE:
        raise InputError(
            f"{path} is of {table.model}, {table.parameters / 1e9:.3g} billion parameters, and"
            f" {subject.architecture.name} has {wanted / 1e9:.3g}",
            hint="Check --target",
        )
    if table.gpu_layers is not None and table.gpu_layers <= subject.architecture.layers:
        raise InputError(
            f"{path}: {table.gpu_layers} of {subject.architecture.layers} layers and the output"
            " ran on the GPU, the rest on the CPU: no profile of one device",
            hint="Run llama-bench with `-ngl 999`",
        )


def imported_profile(
    table: ImportedTable, subject: TimedModel, *, path: Path, source: str | None = None
) -> Profile:
    """The profile of the times in `table`, read from `path`.

    source  tool and version, where the file does not say the version
    Raises InputError where neither says it, and for times that cannot be right.
    """
    if table.version is None and not source:
        raise InputError(
            f"{path} does not say which version measured it",
            hint="Give --source, such as --source 'vLLM 0.33.0, run of 2026-11-20'",
        )
    check_subject(table, subject, path)
    weights = table.weights or WeightFormat()
    roofline = subject.roofline(weights)
    on_cpu = subject.device.kind == "cpu"
    warning = check_times(table.points, roofline, path, on_cpu=on_cpu)
    if warning:
        raise InputError(f"{path}: {warning}", hint="Check --device, --target and --tp")
    fitted, left = table.points, None
    if len(fitted) > MOST_FITTED:  # chosen without looking at their times
        index = design_points(fitted, roofline, MOST_FITTED)
        left = fitted.take(np.delete(np.arange(len(fitted)), index))
        fitted = fitted.take(index)
    selection, held_out = select_calibration(fitted, roofline), None
    error = selection.cross_validated.get(selection.selected)  # None of too few points
    if left is not None:
        place = left.rows, left.context, left.batch
        error = ErrorSummary.of(selection.calibration.predict_s(*place), left.seconds)
        linear_error = ErrorSummary.of(selection.linear.predict_s(*place), left.seconds)
        held_out = schema.HeldOutSection(error=error, linear_error=linear_error)
    points, plain, prefill = table.points, None, None
    one_row = points.take(points.rows == 1).sorted()
    if len(one_row):
        axes = {"context": one_row.context.astype(int), "batch": one_row.batch.astype(int)}
        plain = schema.PlainSection.model_validate(axes | _columns(one_row))
    # Whole prompts of one sequence, where two lengths or more were timed.
    whole = points.take((points.context == 0) & (points.batch == 1) & (points.rows > 1)).sorted()
    if len(whole) > 1:
        axes = {"tokens": whole.rows.astype(int)}
        prefill = schema.TokensSection.model_validate(axes | _columns(whole))
    said = (table.tool, table.version, source, table.model, f"file {path.name}")
    device = subject.device
    if table.threads is not None and on_cpu:
        device = device.model_copy(update={"threads": table.threads})
    return Profile(
        provenance=schema.ProvenanceSection(
            kind="imported",
            created_utc=now_utc(),
            tool_version=tool_version(),
            source=", ".join(part for part in said if part)[:2000],
            points=len(table.points),
            samples=int(table.points.n.sum()),
            error_bar=None if error is None else min(error.mape, 10.0),
            note=_note(table, held_out),
        ),
        device=device,
        target=schema.TargetSection.of(subject.architecture),
        runtime=schema.RuntimeSection(
            kind=table.runtime,
            dtype=weights.dtype,
            quantization=weights.quantization,
            weight_bytes=weights.weight_bytes if weights.quantization else None,
            head_bytes=weights.weight_bytes if weights.quantization else None,
            attention=table.tool,
            tensor_parallel=subject.tensor_parallel,
        ),
        peaks=subject.peaks,
        calibration=schema.CalibrationSection.of(selection),
        surface=schema.SurfaceSection.of(fitted),
        held_out=held_out,
        stages=schema.StagesSection(plain=plain, prefill=prefill),
    )


def _note(table: ImportedTable, held_out: schema.HeldOutSection | None) -> str:
    points = table.points
    parts = [
        f"not in the times: {'; '.join(table.lacks)}",
        "no draft and no acceptance was timed",
        f"up to {int(points.rows.max())} rows, {int(points.context.max())} cached tokens and batch"
        f" {int(points.batch.max())}: anything beyond is extrapolated",
        *(f"left out, {count} records {why}" for why, count in table.left_out.items()),
        "error bar: mean error of points "
        + ("held out of the fit" if held_out else "left out by cross-validation"),
    ]
    return "; ".join(parts)[:2000]


def _columns(points: Points) -> dict[str, object]:
    return {"median_s": points.seconds, "mad_s": points.mad_s, "n": points.n.astype(int)}
