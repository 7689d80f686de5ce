"""Every calibration of a table of forward times, and its error on points held out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.chooser import choose_points
from costmodel.device import DeviceSpec, device_by_name, find_device
from costmodel.errors import InputError
from costmodel.fit import (
    CALIBRATIONS,
    LinearCalibration,
    PhysicalCalibration,
    Points,
    Selection,
    TwoBranchCalibration,
    regret_at_contexts,
    select_calibration,
)
from costmodel.physical import COEFFICIENTS
from costmodel.roofline import Roofline
from costmodel.targets import find_target
from profiler.point_table import read_points
from profiler.render import note, print_table

Array = NDArray[np.float64]

MIN_CHOSEN = 10
_TOO_FAST, _VERY_SLOW = 0.5, 300.0


def fit_table(
    path: Path, *, device: str, target: str, tensor_parallel: int = 1, count: int | None = None
) -> dict[str, Any]:
    """Fit a table and report; with `count` only so many chosen points. Raises InputError."""
    if tensor_parallel < 1:
        raise InputError(f"--tp must be 1 or more (is {tensor_parallel})")
    spec = _device(device)
    entry = find_target(target)
    points = read_points(path)
    roofline = Roofline(
        architecture=entry.architecture, peaks=spec.peaks, tensor_parallel=tensor_parallel
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
    """A warning where times are very long for the device. Raises InputError for impossible ones.

    Half of the points faster than half of the physical bound, or three hundred times slower, are
    more often another unit, device or target than a measurement.
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
    """All points fitted; errors of points left out one group at a time."""
    selection = select_calibration(points, roofline)
    calibrations = {}
    for name in CALIBRATIONS:
        if name in selection.cross_validated:
            predicted_s = selection.predicted_left_out_s[name]
            held_out = held_out_error(points, predicted_s, np.ones(len(points), dtype=bool))
            calibrations[name] = {"held_out": held_out, **coefficients(selection, name)}
    return {"fitted": len(points), "selected": selection.selected, "calibrations": calibrations}


def chosen(points: Points, roofline: Roofline, count: int) -> dict[str, Any]:
    """`count` points chosen and fitted; errors of all others."""
    index = choose_points(points, roofline, count)
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
    """Errors of the points in `left`; regret over all points of each context."""
    result: dict[str, Any] = weighted_error(points, predicted_s, left)
    regret = regret_at_contexts(points, predicted_s)
    result["regret"] = None if regret is None else regret.mean
    result["regret_worst"] = None if regret is None else regret.worst
    return result


def weighted_error(
    points: Points, predicted_s: ArrayLike, left: NDArray[np.bool_]
) -> dict[str, Any]:
    """Mean and 95th percentile of relative errors, every row count weighing alike."""
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
    """The coefficients of the calibrations that are formulas, with their standard errors."""
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
        shape = {"tile_rows": fitted.tile_rows, "attention_rows": fitted.attention_rows}
        intervals = {"intervals_95": fitted.intervals(), "standard_errors": errors}
        return {"coefficients": values | shape | intervals}
    return {}


def print_fit(result: dict[str, Any]) -> None:
    """A table of the calibrations, and which was selected."""
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


def _device(name: str) -> DeviceSpec:
    return device_by_name(name) or find_device(name)
