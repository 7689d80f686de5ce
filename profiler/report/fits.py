"""Fits of all calibrations to a table of forward times, with held-out errors."""

from __future__ import annotations

import csv
import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.calibration.base import CALIBRATIONS
from costmodel.calibration.design import design_points
from costmodel.calibration.linear import LinearCalibration
from costmodel.calibration.physical import COEFFICIENTS, PhysicalCalibration
from costmodel.calibration.points import Points
from costmodel.calibration.selection import Selection, regret_at_contexts, select_calibration
from costmodel.calibration.two_branch import TwoBranchCalibration
from costmodel.catalog import find_device, resolve_target
from costmodel.communication import protocols_of
from costmodel.errors import InputError
from costmodel.io import read_table
from costmodel.roofline import Roofline
from profiler.report.console import note, print_table

Array = NDArray[np.float64]

MIN_CHOSEN = 10
_TOO_FAST, _VERY_SLOW = 0.5, 300.0
_TIMES = {
    "seconds": 1.0,
    "milliseconds": 1e-3,
    "microseconds": 1e-6,
    "forward_s": 1.0,
    "forward_ms": 1e-3,
    "forward_us": 1e-6,
}
_UNITS = {"_s": 1.0, "_ms": 1e-3, "_us": 1e-6}
_HINT = "Give a CSV with the columns new_tokens, context_tokens and seconds or microseconds"
MOST_ROWS = 200_000


def fit_table(
    path: Path, *, device: str, target: str, tensor_parallel: int = 1, count: int | None = None
) -> dict[str, Any]:
    """Fit all calibrations to the table at `path`, or to `count` points chosen from it.

    Returns a report of plain values. Raises InputError.
    """
    if tensor_parallel < 1:
        raise InputError(f"--tp must be 1 or more (is {tensor_parallel})")
    spec = find_device(device)
    entry = resolve_target(target, hub=True)
    points = read_points(path)
    roofline = Roofline(
        architecture=entry.architecture,
        peaks=spec.peaks,
        tensor_parallel=tensor_parallel,
        protocols=protocols_of(spec.slug, tensor_parallel),
    )
    report = {
        **unit_check(points, roofline, path),
        "points": len(points),
        "device": spec.name,
        "target": entry.architecture.name,
        "tensor_parallel": tensor_parallel,
    }
    if count is None:
        return report | cross_validated(points, roofline)
    if not MIN_CHOSEN <= count < len(points):
        raise InputError(
            f"--points must be at least {MIN_CHOSEN} and below the {len(points)} of the table"
            f" (is {count})"
        )
    return report | chosen(points, roofline, count)


def unit_check(points: Points, roofline: Roofline, path: Path) -> dict[str, str]:
    """A warning for times that are very long for the device. Raises InputError for impossible ones.

    A median below half the physical roofline, or above 300 times it, comes more often from a wrong
    unit, device or target than from a measurement.
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
    if ratio > _VERY_SLOW:
        return {"warning": f"times are {ratio:.3g} times the physical bound: is the unit right?"}
    return {}


def cross_validated(points: Points, roofline: Roofline) -> dict[str, Any]:
    """Fits to all points, with errors by cross-validation."""
    selection = select_calibration(points, roofline)
    calibrations = {}
    for name in CALIBRATIONS:
        if name in selection.cross_validated:
            predicted_s = selection.predicted_left_out_s[name]
            held_out = held_out_error(points, predicted_s, np.ones(len(points), dtype=bool))
            calibrations[name] = {"held_out": held_out, **coefficients(selection, name)}
    return {"fitted": len(points), "selected": selection.selected, "calibrations": calibrations}


def chosen(points: Points, roofline: Roofline, count: int) -> dict[str, Any]:
    """Fits to `count` chosen points, with errors on all others."""
    index = design_points(points, roofline, count)
    selection = select_calibration(points.take(index), roofline)
    left = np.ones(len(points), dtype=bool)
    left[index] = False
    calibrations = {}
    for name, calibration in selection.fitted().items():
        predicted_s = calibration.predict_s(points.rows, points.context, points.batch)
        held_out = held_out_error(points, predicted_s, left)
        unseen = left & ~np.isin(points.rows, points.rows[index])
        if unseen.any():
            held_out["rows_never_fitted"] = weighted_error(points, predicted_s, unseen)
        calibrations[name] = {"held_out": held_out, **coefficients(selection, name)}
    shapes = zip(points.rows[index], points.context[index], points.batch[index], strict=True)
    return {
        "fitted": count,
        "selected": selection.selected,
        "calibrations": calibrations,
        "chosen": [[int(x) for x in shape] for shape in shapes],
    }


def held_out_error(points: Points, predicted_s: Array, left: NDArray[np.bool_]) -> dict[str, Any]:
    """Errors on the points in `left` [points]; regret over all points of each context."""
    result: dict[str, Any] = weighted_error(points, predicted_s, left)
    regret = regret_at_contexts(points, predicted_s)
    result["regret"] = None if regret is None else regret.mean
    result["regret_worst"] = None if regret is None else regret.worst
    return result


def weighted_error(
    points: Points, predicted_s: ArrayLike, left: NDArray[np.bool_]
) -> dict[str, Any]:
    """Relative errors on the points in `left` [points], with equal weight for each row count."""
    error = np.abs(np.asarray(predicted_s)[left] / points.seconds[left] - 1)
    _, inverse, counts = np.unique(points.rows[left], return_inverse=True, return_counts=True)
    weight = 1 / counts[inverse] / len(counts)
    order = np.argsort(error)
    reached = np.searchsorted(np.cumsum(weight[order]), 0.95 - 1e-12)
    return {
        "points": int(left.sum()),
        "row_counts": len(counts),
        "mape": float(np.sum(weight * error)),
        "p95": float(error[order][min(int(reached), len(error) - 1)]),
        "worst": float(np.max(error)),
        "mape_of_points": float(np.mean(error)),
        "p95_of_points": float(np.quantile(error, 0.95)),
    }


def coefficients(selection: Selection, name: str) -> dict[str, Any]:
    """Coefficients and standard errors of a calibration that is a formula; empty for others."""
    fitted = selection.fitted()[name]
    if isinstance(fitted, LinearCalibration):
        names = ("slope", "intercept_s", "slope_se", "intercept_se_s")
        return {"coefficients": {field: getattr(fitted, field) for field in names}}
    if isinstance(fitted, TwoBranchCalibration):
        names = ("memory_slope", "memory_floor_s", "compute_slope", "compute_floor_s")
        values = {field: getattr(fitted, field) for field in names}
        return {"coefficients": values | {"standard_errors": list(fitted.standard_errors)}}
    if isinstance(fitted, PhysicalCalibration):
        values = dict(zip(COEFFICIENTS, fitted.coefficients, strict=True))
        errors = dict(zip(COEFFICIENTS, fitted.standard_errors, strict=True))
        shape = dataclasses.asdict(fitted.shape) | {"communication": fitted.communication}
        intervals = {"intervals_95": fitted.intervals(), "standard_errors": errors}
        return {"coefficients": values | shape | intervals}
    return {}


def print_fit(result: dict[str, Any]) -> None:
    """Print a table of the calibrations, and the one that was selected."""
    if "warning" in result:
        note(f"warning: {result['warning']}")
    note(
        f"{result['target']} on {result['device']}: {result['fitted']} of {result['points']}"
        f" points fitted"
    )
    rows = []
    for name, calibration in result["calibrations"].items():
        held_out = calibration["held_out"]
        keys = ("mape", "p95", "worst", "regret", "regret_worst")
        values = [held_out[key] for key in keys]
        rows.append([name, *(None if x is None else f"{100 * x:.2f}%" for x in values)])
    print_table(("calibration", "mean", "p95", "worst", "regret", "worst regret"), rows)
    note(f"selected: {result['selected']}")


def read_points(path: Path) -> Points:
    """Points from a CSV with `new_tokens`, `context_tokens`, a time, and optionally `batch`.

    Rows with an empty time are left out; repeats of a shape are averaged. The time is the column
    `seconds`, `milliseconds`, `microseconds` or `forward_(s|ms|us)`, else the only column whose
    name ends in a unit. Raises InputError with the line and the problem.
    """
    try:
        return _parse(csv.DictReader(read_table(path)), path)
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} is not a CSV table ({error})", hint=_HINT) from None


def _parse(table: csv.DictReader[str], path: Path) -> Points:
    names = {(name or "").strip().lower(): name for name in table.fieldnames or ()}
    missing = [name for name in ("new_tokens", "context_tokens") if name not in names]
    if missing:
        raise InputError(f"{path} has no column {' and no column '.join(missing)}", hint=_HINT)
    time, unit = _time_column(names, path)
    shapes: dict[tuple[int, int, int], list[float]] = {}
    for row in table:
        if len(shapes) > MOST_ROWS:
            raise InputError(f"{path} has more than {MOST_ROWS} shapes", hint=_HINT)
        cell = (row.get(names[time]) or "").strip()
        if not cell:
            continue
        at = f"{path}, line {table.line_num}"
        shape = (
            _whole(row, names, "new_tokens", 1, at),
            _whole(row, names, "context_tokens", 0, at),
            _whole(row, names, "batch", 1, at) if "batch" in names else 1,
        )
        shapes.setdefault(shape, []).append(_seconds(cell, names[time], unit, at))
    if not shapes:
        raise InputError(f"{path} has no rows with a time in the column {names[time]}", hint=_HINT)
    seconds = [sum(times) / len(times) for times in shapes.values()]
    rows, context, batch = zip(*shapes, strict=True)
    points = Points(rows=rows, context=context, batch=batch, seconds=seconds)
    _check(points, path)
    return points


def _time_column(names: dict[str, str], path: Path) -> tuple[str, float]:
    for name, unit in _TIMES.items():
        if name in names:
            return name, unit
    times = [(n, unit) for n in names for end, unit in _UNITS.items() if n.endswith(end)]
    if len(times) == 1:
        return times[0]
    problem = "no column of times" if not times else "several columns of times: "
    raise InputError(f"{path} has {problem}{', '.join(name for name, _ in times)}", hint=_HINT)


def _whole(row: dict[str, str], names: dict[str, str], name: str, least: int, at: str) -> int:
    cell = (row.get(names[name]) or "").strip()
    try:
        value = float(cell)
    except ValueError:
        raise InputError(f"{at}: {name} must be a whole number (is {cell!r})") from None
    if not math.isfinite(value) or value != int(value) or not least <= value < 1e9:
        raise InputError(f"{at}: {name} must be a whole number of {least} or more (is {cell})")
    return int(value)


def _seconds(cell: str, name: str, unit: float, at: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        raise InputError(f"{at}: {name} must be a number (is {cell!r})") from None
    if not math.isfinite(value) or value <= 0:
        raise InputError(f"{at}: {name} must be a finite number above 0 (is {cell})")
    return value * unit


def _check(points: Points, path: Path) -> None:
    if len(points) < 4:
        raise InputError(
            f"{path} has {len(points)} shapes with a time, and a fit needs 4 or more", hint=_HINT
        )
    if len(set(points.seconds.tolist())) == 1:
        raise InputError(
            f"all times in {path} are the same, which no measurement gives",
            hint="Check where the times come from",
        )
    if len(set(points.rows.tolist())) < 2:
        raise InputError(
            f"{path} has one row count only (new_tokens = {points.rows[0]:g})",
            hint="Measure several row counts",
        )
