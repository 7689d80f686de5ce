"""Selection of a calibration: fit all, cross-validate them, take the best."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.calibration.base import CALIBRATIONS, Calibration, CalibrationName
from costmodel.calibration.linear import LinearCalibration, fit_linear
from costmodel.calibration.physical import PhysicalCalibration, fit_physical
from costmodel.calibration.points import ErrorSummary, Points
from costmodel.calibration.stairs import StairsCalibration, fit_stairs
from costmodel.calibration.surface import EXACT, SurfaceCalibration, SurfaceOptions, build_surface
from costmodel.errors import InputError
from costmodel.roofline import Roofline
from costmodel.speculation import Regret, decision_regret, standard_curves

Array = NDArray[np.float64]
MIN_CHOICES = 4  # row counts of a context; with fewer there is hardly a choice to get wrong
_ONE_BY_ONE = 40  # points up to which each is left out alone
_STRUCTURE = 4.0  # left-out errors above this multiple of the noise are structure
# Six coefficients and a correction need a few points more than they have numbers.
_LEAST_POINTS = {"physical": 8, "stairs": 10}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Selection:
    """The calibrations of one set of points, and the name of the selected one.

    `predicted_left_out_s` holds each calibration's predictions of points left out of its fit,
    `cross_validated` their error, and `regret` the loss from choosing N by them. A calibration
    for which the points are too few is None.
    """

    selected: CalibrationName
    linear: LinearCalibration
    physical: PhysicalCalibration | None = None
    stairs: StairsCalibration | None = None
    surface: SurfaceCalibration | None = None
    cross_validated: dict[CalibrationName, ErrorSummary]
    regret: dict[CalibrationName, Regret] = dataclasses.field(default_factory=dict)
    predicted_left_out_s: dict[CalibrationName, Array] = dataclasses.field(default_factory=dict)

    @property
    def calibration(self) -> Calibration:
        """The selected one."""
        return self.fitted()[self.selected]

    def fitted(self) -> dict[str, Calibration]:
        """Every calibration that could be fitted, the simplest first."""
        calibrations = {name: getattr(self, name) for name in CALIBRATIONS}
        return {name: fitted for name, fitted in calibrations.items() if fitted is not None}


def fit_surface(
    points: Points, roofline: Roofline, options: SurfaceOptions | None = None
) -> SurfaceCalibration:
    """Interpolate measured points; without `options` cross-validation chooses them.

    Whole row counts are left out to choose how to interpolate over rows, single points to
    choose how to smooth over contexts. Raises InputError for too few points.
    """
    if options is None:
        build_surface(points, roofline, EXACT)  # too few points: say so at once
        options = _best_options(points, roofline)
    return build_surface(points, roofline, options)


def regret_at_contexts(points: Points, predicted_s: ArrayLike) -> Regret | None:
    """Decision regret over the standard curves, choosing among each context's row counts.

    None where no context (and batch) has two row counts or more. Points of one shape that
    come twice count once.
    """
    predicted = np.asarray(predicted_s, dtype=np.float64)
    regrets = [
        decision_regret(predicted[here], points.seconds[here], points.rows[here] - 1)
        for here in _choices(points)
    ]
    if not regrets:
        return None
    decisions = sum(regret.decisions for regret in regrets)
    return Regret(
        mean=sum(regret.mean * regret.decisions for regret in regrets) / decisions,
        worst=max(regret.worst for regret in regrets),
        decisions=decisions,
    )


def has_choices(points: Points) -> NDArray[np.bool_]:
    """[points] whether a point's context has row counts enough for a choice to be judged."""
    _, number, counts = np.unique(points.context, return_inverse=True, return_counts=True)
    enough: NDArray[np.bool_] = counts[number] >= MIN_CHOICES
    return enough


def costly_choices(points: Points, predicted_s: ArrayLike, tolerated: float) -> list[int]:
    """The points between which a choice of `regret_at_contexts` loses more than is tolerated.

    For each such choice these are the point that is chosen, and the one that is best; their
    numbers, in ascending order.
    """
    predicted = np.asarray(predicted_s, dtype=np.float64)
    numbers: set[int] = set()
    for here in _choices(points):
        for curve in standard_curves():
            committed = curve.committed(points.rows[here] - 1)
            rates = committed / points.seconds[here]
            chosen, best = int(np.argmax(committed / predicted[here])), int(np.argmax(rates))
            if rates[chosen] < (1 - tolerated) * rates[best]:
                numbers |= {int(here[chosen]), int(here[best])}
    return sorted(numbers)


def _choices(points: Points) -> Iterator[NDArray[np.intp]]:
    """The numbers of each context's points to choose among, one for each row count."""
    shapes = np.stack([points.context, points.batch], axis=1)
    for context, batch in np.unique(shapes, axis=0):
        here = np.flatnonzero((points.context == context) & (points.batch == batch))
        rows, first = np.unique(points.rows[here], return_index=True)
        if len(rows) > 1:
            yield here[first]


def select_calibration(points: Points, roofline: Roofline) -> Selection:
    """Fit all calibrations; take the one with the least loss on points left out.

    The loss is the mean error plus the mean regret. Where the loss is structure, far above the
    noise, `stairs` is taken even if it is worse by up to one standard error of the difference:
    each point was chosen for what no other one shows, and leaving it out costs most the
    calibration that learns most from it. A calibration is None where the points are too few
    for it. Raises InputError where not even the linear one can be fitted.
    """
    fitters = _fitters(roofline)
    calibrations: dict[str, Calibration] = {"linear": fit_linear(points, roofline)}
    errors: dict[CalibrationName, ErrorSummary] = {}
    regrets: dict[CalibrationName, Regret] = {}
    losses: dict[CalibrationName, Array] = {}
    left_out: dict[CalibrationName, Array] = {}
    for name in CALIBRATIONS:
        if len(points) < _LEAST_POINTS.get(name, 0):
            continue
        try:
            fitted, refit = fitters[name](points)
            left_out_s = left_out[name] = _left_out_predictions(points, refit, _folds(points))
        except InputError:
            continue
        calibrations[name] = fitted
        errors[name] = ErrorSummary.of(left_out_s, points.seconds)
        regret = regret_at_contexts(points, left_out_s)
        if regret is not None:
            regrets[name] = regret
        relative = np.abs(left_out_s - points.seconds) / points.seconds
        losses[name] = relative + (regret.mean if regret else 0.0)
    return Selection(
        selected=_selected(losses, calibrations.get("stairs")),  # type: ignore[arg-type]
        cross_validated=errors,
        regret=regrets,
        predicted_left_out_s=left_out,
        **calibrations,  # type: ignore[arg-type]
    )


def _folds(points: Points) -> int:
    """Ten groups, or every point by itself where there are few."""
    return len(points) if len(points) <= _ONE_BY_ONE else 10


def _selected(
    losses: Mapping[CalibrationName, Array], stairs: StairsCalibration | None
) -> CalibrationName:
    """The name with the least mean loss, or stairs where `select_calibration` prefers it."""
    if not losses:
        return "linear"
    name = min(losses, key=lambda name: float(np.mean(losses[name])))
    if stairs is None or "stairs" not in losses:
        return name
    worse = losses["stairs"] - losses[name]
    structure = np.mean(losses[name]) > _STRUCTURE * stairs.scales.noise
    chance = np.mean(worse) <= np.std(worse) / np.sqrt(len(worse))
    return "stairs" if structure and chance else name


Fitter = Callable[[Points], tuple[Calibration, Callable[[Points], Calibration]]]


def _fitters(roofline: Roofline) -> Mapping[str, Fitter]:
    """For each name, a function of points: their fit, and the fit of a part of them."""

    def simple(fit: Callable[[Points, Roofline], Calibration]) -> Fitter:
        def refit(part: Points) -> Calibration:
            return fit(part, roofline)

        return lambda some: (refit(some), refit)

    def surface(some: Points) -> tuple[Calibration, Callable[[Points], Calibration]]:
        fitted = fit_surface(some, roofline)
        return fitted, partial(build_surface, roofline=roofline, options=fitted.options)

    def stairs(some: Points, roofline: Roofline) -> Calibration:
        return fit_stairs(some, fit_physical(some, roofline))

    return {
        "linear": simple(fit_linear),
        "physical": simple(fit_physical),
        "stairs": simple(stairs),
        "surface": surface,
    }


def _best_options(points: Points, roofline: Roofline) -> SurfaceOptions:
    groups = _random_groups(len(points), 8) + _row_groups(points)
    scores: list[tuple[float, SurfaceOptions]] = []
    for over_rows, over_context in product(("work", "log"), ("exact", "line", "mean")):
        options = SurfaceOptions(rows=over_rows, context=over_context)  # type: ignore[arg-type]
        try:
            fit = partial(build_surface, roofline=roofline, options=options)
            error = _left_out_error(points, fit, groups)
        except InputError:
            return EXACT
        scores.append((error.mape, options))
    return min(scores, key=lambda score: score[0])[1]


def _left_out_predictions(
    points: Points, fit: Callable[[Points], Calibration], folds: int
) -> Array:
    """Each point as predicted by a fit without its group."""
    predicted = np.empty(len(points))
    for left_out in _random_groups(len(points), folds):
        part = points.take(left_out)
        calibration = fit(points.take(~left_out))
        predicted[left_out] = calibration.predict_s(part.rows, part.context, part.batch)
    return predicted


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
