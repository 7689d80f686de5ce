"""Forward times of other tools: a table of them, the checks that its readers share, profiles."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.architecture import ModelArchitecture
from costmodel.calibration.design import design_points
from costmodel.calibration.points import ErrorSummary, Points
from costmodel.calibration.selection import select_calibration
from costmodel.catalog import DeviceFingerprint, device_slug, find_device
from costmodel.errors import InputError, shown
from costmodel.fields import LEAST_S, MOST_S, is_whole
from costmodel.io import now_utc, number_of, read_table, tool_version
from costmodel.plugins import READERS, load_plugin
from costmodel.profile import schema
from costmodel.profile.profile import Profile
from costmodel.roofline import Roofline
from costmodel.statistics import mad_s

LEAST_POINTS = 4
MOST_SHAPES = 200_000
_TIMES = ("seconds", "milliseconds", "microseconds", "forward_s", "forward_ms", "forward_us")
_UNITS = {"s": 1.0, "sec": 1.0, "ms": 1e-3, "msec": 1e-3, "us": 1e-6, "usec": 1e-6, "ns": 1e-9}
_UNITS |= {"seconds": 1.0, "milliseconds": 1e-3, "microseconds": 1e-6, "nanoseconds": 1e-9}
# At the end of a name, as in `forward_ms`, `latency (ms)`, `time [us]`, `seconds`.
_UNIT = re.compile(rf"(?:^|[_ (\[])({'|'.join(_UNITS)})[)\]]?$")
_CSV_HINT = "Give a CSV with the columns new_tokens, context_tokens and seconds or microseconds"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImportedTable:
    """Forward times of one tool and setting.

    tool        the tool's name; `version` is None where the file does not say it
    runtime     `external`: steps of an engine; `kernels`: host time is left out, or it is unknown
    lacks       what the times do not hold, for people
    left_out    records that are no forward of equal sequences, by reason
    dtype, quantization, weight_bytes  of weights, as a profile has them, bytes in the mean
    processor   the device as the file names it; `threads` of a CPU
    parameters  of the model; 0 where the file does not say
    gpu_layers  layers that ran on the GPU, the output's counted as one; None: all
    model       the model as the file names it
    """

    points: Points
    tool: str
    version: str | None
    runtime: schema.RuntimeKind
    lacks: tuple[str, ...]
    left_out: Mapping[str, int] = dataclasses.field(default_factory=dict)
    dtype: schema.Dtype = "bfloat16"
    quantization: str | None = None
    weight_bytes: float | None = None
    processor: str | None = None
    threads: int | None = None
    parameters: int = 0
    gpu_layers: int | None = None
    model: str | None = None

    def section(self, tensor_parallel: int) -> schema.RuntimeSection:
        return schema.RuntimeSection(
            kind=self.runtime,
            dtype=self.dtype,
            quantization=self.quantization,
            weight_bytes=self.weight_bytes,
            head_bytes=self.weight_bytes,  # a mean over all
            attention=self.tool,
            tensor_parallel=tensor_parallel,
        )


class ShapeTimes:
    """Times by shape (rows, context, batch) while a file is read; repeats of a shape are averaged.

    `left_out` counts records that give no point, by reason.
    """

    def __init__(self, path: Path, *, hint: str) -> None:
        self.path, self.hint = path, hint
        self.left_out: Counter[str] = Counter()
        self._times: dict[tuple[int, int, int], list[tuple[float, float, int]]] = {}

    def add(
        self, shape: tuple[int, int, int], seconds: float, *, samples_s: Sequence[float] = ()
    ) -> None:
        """Add one median; `samples_s` are the times behind it. Raises InputError."""
        if not LEAST_S <= seconds <= MOST_S:
            raise InputError(
                f"{self.path}: {seconds:g} s for {shape[0]} rows is no time of a forward",
                hint="Check the unit of the times",
            )
        if len(self._times) > MOST_SHAPES:
            raise InputError(f"{self.path} has more than {MOST_SHAPES} shapes", hint=self.hint)
        spread_s = mad_s(samples_s)
        entry = (seconds, math.nan if spread_s is None else spread_s, max(len(samples_s), 1))
        self._times.setdefault(shape, []).append(entry)

    def points(self) -> Points:
        """All points. Raises InputError where they are too few for a fit, or no measurement."""
        left = "; ".join(f"{count} left out: {why}" for why, count in self.left_out.items())
        reasons = left or self.hint
        if not self._times:
            raise InputError(f"{self.path} has no times that can be used", hint=reasons)
        shapes, entries = list(self._times), list(self._times.values())
        rows, context, batch = zip(*shapes, strict=True)
        points = Points(
            rows=rows,
            context=context,
            batch=batch,
            seconds=[sum(time for time, _, _ in one) / len(one) for one in entries],
            mad_s=[max(spread for _, spread, _ in one) for one in entries],
            n=[sum(count for _, _, count in one) for one in entries],
        )
        if len(points) < LEAST_POINTS:
            raise InputError(
                f"{self.path} has {len(points)} shapes with a time, and a fit needs"
                f" {LEAST_POINTS} or more",
                hint=reasons,
            )
        if len(set(points.seconds.tolist())) == 1:
            raise InputError(
                f"all times in {self.path} are the same, which no measurement gives",
                hint="Check where the times come from",
            )
        if len(set(points.rows.tolist())) < 2:
            raise InputError(
                f"{self.path} has one row count only ({points.rows[0]:g} new tokens a sequence)",
                hint="Measure several row counts",
            )
        return points


class TableRecord:
    """One mapping of a file; errors name the file, the record and the field."""

    def __init__(self, value: Any, at: str, *, hint: str) -> None:
        self.at, self.hint = at, hint
        if not isinstance(value, Mapping):
            raise self._error(f"is not a mapping of fields (is {shown(value)})")
        self.fields = value

    def _error(self, problem: str) -> InputError:
        return InputError(f"{self.at} {problem}", hint=self.hint)

    def get(self, name: str) -> Any:
        if name not in self.fields:
            raise self._error(f"has no field {name}")
        return self.fields[name]

    def whole(self, name: str, least: int = 0) -> int:
        value = self.get(name)
        if not is_whole(value, least):
            raise self._error(f"{name} must be a whole number from {least} (is {shown(value)})")
        return value

    def positive(self, name: str) -> float:
        return self._positive(name, self.get(name))

    def numbers(self, name: str) -> list[float]:
        return [self._positive(name, value) for value in self._list(name)]

    def terms(self, name: str) -> list[float]:
        """Numbers, which may be 0 or below."""
        values = self._list(name)
        if not all(type(value) in (int, float) for value in values):
            raise self._error(f"{name} must be a list of numbers")
        return [float(value) for value in values]

    def wholes(self, name: str, least: int = 1) -> list[int]:
        """Ascending whole numbers of `least` or more."""
        values = self._list(name)
        for value in values:
            if not is_whole(value, least):
                raise self._error(
                    f"{name} must hold whole numbers from {least} (has {shown(value)})"
                )
        if values != sorted(set(values)) or not values:
            raise self._error(f"{name} must ascend, with one number or more")
        return values

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str) or not value.strip():
            raise self._error(f"{name} must be a text (is {shown(value)})")
        return value.strip()

    def _list(self, name: str) -> list[Any]:
        value = self.get(name)
        if not isinstance(value, list):
            raise self._error(f"{name} must be a list (is {shown(value)})")
        return value

    def _positive(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._error(f"{name} must be a number (is {shown(value)})")
        if not 0 < value < math.inf:
            raise self._error(f"{name} must be a finite number above 0 (is {shown(value)})")
        return float(value)


def read_csv(path: Path, context: int | None = None) -> ImportedTable:
    """The points of a CSV with `new_tokens`, `context_tokens`, a time, and optionally `batch`.

    Rows with an empty time are left out; repeats of a shape are averaged. The time is one of
    _TIMES, else the only column whose name ends in a unit, such as `latency (ms)`. Raises
    InputError.
    """
    names, lines = read_table(path, ("new_tokens", "context_tokens"), hint=_CSV_HINT)
    units = {name: _UNITS[match[1]] for name in names if (match := _UNIT.search(name))}
    usual = [name for name in _TIMES if name in units]
    if not usual and len(units) != 1:
        problem = "several columns of times: " if units else "no column of times"
        raise InputError(f"{path} has {problem}{', '.join(units)}", hint=_CSV_HINT)
    time = (usual or list(units))[0]
    times = ShapeTimes(path, hint=_CSV_HINT)
    empty = True
    for at, row in lines:
        if not row[time]:
            continue
        empty, seconds = False, units[time] * number_of(row[time], at, time)
        if not seconds > 0:
            raise InputError(f"{at}: {time} must be a number above 0 (is {row[time]})")
        shape = (
            _whole(row, "new_tokens", 1, at),
            _whole(row, "context_tokens", 0, at),
            _whole(row, "batch", 1, at) if "batch" in names else 1,
        )
        times.add(shape, seconds)
    if empty:
        raise InputError(f"{path} has no rows with a time in the column {time}", hint=_CSV_HINT)
    return ImportedTable(
        points=times.points(),
        tool="CSV table",
        version=None,
        runtime="kernels",
        lacks=("host time, as far as the table leaves it out",),
    )


def _whole(row: dict[str, str], name: str, least: int, at: str) -> int:
    value = number_of(row[name], at, name)
    if value != int(value) or not least <= value < 1e9:
        raise InputError(f"{at}: {name} must be a whole number of {least} or more (is {row[name]})")
    return int(value)


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

    def roofline(self, table: ImportedTable) -> Roofline:
        return table.section(self.tensor_parallel).roofline(self.architecture, self.peaks)


def read_times(name: str, path: Path, context: int | None = None) -> ImportedTable:
    """The forward times in a file: a CSV, or the format of an entry point `times.NAME`.

    context  cached tokens of each request, where the file does not say it
    """
    reader = read_csv if name == "csv" else load_plugin(READERS, name, "times.", ("csv",))
    table: ImportedTable = reader(path, context)
    return table


def check_times(points: Points, roofline: Roofline, path: Path, *, on_cpu: bool = False) -> str:
    """A warning for times that are very long for the device; empty where they are not.

    A median far from the physical roofline comes more often from a wrong unit, device or target
    than from a measurement; a CPU waits for no host. Raises InputError for impossible times.
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
    roofline = subject.roofline(table)
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
        runtime=table.section(subject.tensor_parallel),
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
