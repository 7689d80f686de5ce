"""Fit calibrations to measured points, check them on points left out, choose one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.errors import InputError
from costmodel.linear import LinearCalibration, fit_linear
from costmodel.points import ErrorSummary, Points
from costmodel.roofline import Roofline
from costmodel.surface import SurfaceCalibration, SurfaceOptions, build_surface

__all__ = [
    "Calibration",
    "ErrorSummary",
    "LinearCalibration",
    "Points",
    "Selection",
    "SurfaceCalibration",
    "SurfaceOptions",
    "build_surface",
    "cross_validate",
    "fit_linear",
    "fit_surface",
    "select_calibration",
]

Array = NDArray[np.float64]


class Calibration(Protocol):
    """What every calibration can do."""

    def predict_s(self, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1) -> Array:
        """Seconds of a forward, in the broadcast shape of the arguments."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Selection:
    """The calibrations of one set of points and which of them predicts best.

    `cross_validated` holds each calibration's error on points left out of its fit.
    """

    selected: Literal["linear", "surface"]
    linear: LinearCalibration
    surface: SurfaceCalibration | None
    cross_validated: dict[str, ErrorSummary]

    @property
    def calibration(self) -> Calibration:
        """The selected one."""
        return self.surface if self.surface and self.selected == "surface" else self.linear


def fit_surface(
    points: Points, roofline: Roofline, options: SurfaceOptions | None = None
) -> SurfaceCalibration:
    """Interpolate measured points; `options` left open are chosen by cross-validation.

    Whole row counts are left out to choose how to interpolate over rows, single points to
    choose how to smooth over contexts. Raises InputError for too few points.
    """
    if options is None:
        build_surface(points, roofline, SurfaceOptions())  # too few points: say so at once
        options = _best_options(points, roofline)
    return build_surface(points, roofline, options)


def cross_validate(
    points: Points, fit: Callable[[Points], Calibration], folds: int = 10
) -> ErrorSummary:
    """Error on points left out, every point once, in `folds` random groups (fixed seed).

    Raises InputError where the points are too few to leave some out.
    """
    return _left_out_error(points, fit, _random_groups(len(points), folds))


def select_calibration(points: Points, roofline: Roofline) -> Selection:
    """Fit both calibrations and take the one with the smaller cross-validated mean error.

    Points too few for a surface, or for leaving any out, give the linear one. Raises
    InputError where even that cannot be fitted.
    """
    linear = fit_linear(points, roofline)
    errors: dict[str, ErrorSummary] = {}
    surface: SurfaceCalibration | None = None
    try:
        errors["linear"] = cross_validate(points, lambda part: fit_linear(part, roofline))
        surface = fit_surface(points, roofline)
        options = surface.options
        errors["surface"] = cross_validate(
            points, lambda part: build_surface(part, roofline, options)
        )
    except InputError:
        if "surface" not in errors:
            surface = None
    better = surface is not None and errors["surface"].mape <= errors["linear"].mape
    return Selection(
        selected="surface" if better else "linear",
        linear=linear,
        surface=surface,
        cross_validated=errors,
    )


def _best_options(points: Points, roofline: Roofline) -> SurfaceOptions:
    groups = _random_groups(len(points), 8) + _row_groups(points)
    scores: list[tuple[float, SurfaceOptions]] = []
    for over_rows, over_context in product(("work", "log"), ("exact", "line", "mean")):
        options = SurfaceOptions(rows=over_rows, context=over_context)  # type: ignore[arg-type]
        try:
            fit = partial(build_surface, roofline=roofline, options=options)
            error = _left_out_error(points, fit, groups)
        except InputError:
            return SurfaceOptions()
        scores.append((error.mape, options))
    return min(scores, key=lambda score: score[0])[1]


def _left_out_error(
    points: Points, fit: Callable[[Points], Calibration], groups: list[NDArray[np.bool_]]
) -> ErrorSummary:
    predicted, measured = [], []
    for left_out in groups:
        part = points.take(left_out)
        calibration = fit(points.take(~left_out))
        predicted.append(calibration.predict_s(part.rows, part.context, part.batch))
        measured.append(part.seconds)
    return ErrorSummary.of(np.concatenate(predicted), np.concatenate(measured))


def _random_groups(count: int, folds: int) -> list[NDArray[np.bool_]]:
    order = np.random.default_rng(0).permutation(count)
    groups = []
    for part in np.array_split(order, min(folds, count)):
        mask = np.zeros(count, dtype=bool)
        mask[part] = True
        groups.append(mask)
    return groups


def _row_groups(points: Points) -> list[NDArray[np.bool_]]:
    """Every other row count between the smallest and the largest, then the rest of them."""
    inner = np.unique(points.rows)[1:-1]
    groups = [np.isin(points.rows, inner[start::2]) for start in (0, 1)]
    return [group for group in groups if group.any()]
