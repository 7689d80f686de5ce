"""Fits of all calibrations to a table of forward times, with held-out errors."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.calibration.base import CALIBRATIONS
from costmodel.calibration.linear import LinearCalibration
from costmodel.calibration.physical import COEFFICIENTS, PhysicalCalibration
from costmodel.calibration.points import Points
from costmodel.calibration.selection import Selection, regret_at_contexts, select_calibration
from costmodel.imports.profiles import check_times
from costmodel.roofline import Roofline
from profiler.report.console import note, print_table

Array = NDArray[np.float64]


def fit_table(points: Points, roofline: Roofline, *, path: Path) -> dict[str, Any]:
    """Fit all calibrations to the points read from `path`: a report of plain values.

    Raises InputError.
    """
    warning = check_times(points, roofline, path)
    report = {"warning": warning} if warning else {}
    return report | {"points": len(points)} | cross_validated(points, roofline)


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
