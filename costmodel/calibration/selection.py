"""Selection of a calibration: fit all, cross-validate them, take the best."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np

from costmodel.calibration.choices import choices, regret_at_contexts
from costmodel.calibration.linear import LinearCalibration, fit_linear
from costmodel.calibration.physical import PhysicalCalibration, fit_physical
from costmodel.calibration.points import (
    CALIBRATIONS,
    Calibration,
    CalibrationName,
    ErrorSummary,
    Points,
)
from costmodel.calibration.stairs import StairsCalibration, fit_stairs
from costmodel.errors import InputError
from costmodel.roofline import Roofline
from costmodel.statistics import Array

# A step of the points: times rise by over 10 % more than the roofline, and by over three standard
# errors. A fit that takes less than half of what exceeds the roofline smooths over it.
_STEP, _STEP_ERRORS, _FOLLOWED = np.log(1.10), 3.0, 0.5
_NAMED_STEPS = 3  # the largest
_ONE_BY_ONE = 40  # points up to which each is left out alone


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Selection:
    """The calibrations of one set of points, and the name of the selected one.

    `predicted_left_out_s` holds each calibration's predictions of points left out of its fit,
    `cross_validated` their error, and `cross_validated_regret` the mean loss from choosing N by
    them. A calibration for which the points are too few is None.
    """

    selected: CalibrationName
    linear: LinearCalibration
    physical: PhysicalCalibration | None = None
    stairs: StairsCalibration | None = None
    cross_validated: dict[CalibrationName, ErrorSummary]
    cross_validated_regret: dict[CalibrationName, float]
    predicted_left_out_s: dict[CalibrationName, Array]
    warnings: tuple[str, ...] = ()

    @property
    def calibration(self) -> Calibration:
        return self.fitted()[self.selected]

    def fitted(self) -> dict[str, Calibration]:
        """Every calibration that could be fitted, the simplest first."""
        calibrations = {name: getattr(self, name) for name in CALIBRATIONS}
        return {name: fitted for name, fitted in calibrations.items() if fitted is not None}


def select_calibration(points: Points, roofline: Roofline) -> Selection:
    """Fit all calibrations and select one by its loss on points left out of the fit.

    The loss is the mean error plus the mean regret. Stairs is selected, unless another one
    loses less by more than one standard error of the difference: each point was chosen for
    what no other one shows, and leaving it out costs most the calibration that learns most
    from it. A calibration is None where the points are too few for it. Raises InputError where
    not even the linear one can be fitted.
    """
    calibrations = _fit_all(points, roofline)
    # Each point as predicted by fits without its group, of calibrations that need no group.
    order = np.random.default_rng(0).permutation(len(points))
    left_out: dict[CalibrationName, Array] = {name: np.empty(len(points)) for name in CALIBRATIONS}
    for group in np.array_split(order, len(points) if len(points) <= _ONE_BY_ONE else 10):
        part, fitted = points.take(group), {}
        with contextlib.suppress(InputError):
            fitted = _fit_all(points.take(np.setdiff1d(order, group)), roofline)
        left_out = {name: left_out[name] for name in fitted if name in left_out}
        for name in left_out:
            left_out[name][group] = fitted[name].predict_s(part.rows, part.context, part.batch)
    errors: dict[CalibrationName, ErrorSummary] = {}
    regrets: dict[CalibrationName, float] = {}
    losses: dict[CalibrationName, Array] = {}
    for name, left_out_s in left_out.items():
        errors[name] = ErrorSummary.of(left_out_s, points.seconds)
        regret = regret_at_contexts(points, left_out_s)
        if regret is not None:
            regrets[name] = regret.mean
        relative = np.abs(left_out_s - points.seconds) / points.seconds
        losses[name] = relative + (regret.mean if regret else 0.0)
    selected: CalibrationName = "linear"
    if losses:
        selected = min(losses, key=lambda name: float(np.mean(losses[name])))
    if "stairs" in losses:
        worse = losses["stairs"] - losses[selected]
        if np.mean(worse) <= np.std(worse) / np.sqrt(len(worse)):  # by chance
            selected = "stairs"
    return Selection(
        selected=selected,
        warnings=smoothed_steps(points, calibrations[selected], roofline),
        cross_validated=errors,
        cross_validated_regret=regrets,
        predicted_left_out_s=left_out,
        **{name: calibrations[name] for name in {"linear": None, **left_out}},  # type: ignore[arg-type]
    )


def _fit_all(points: Points, roofline: Roofline) -> dict[CalibrationName, Calibration]:
    """Every calibration for which the points are enough, the simplest first.

    Raises InputError where not even the linear one can be fitted.
    """
    fitted: dict[CalibrationName, Calibration] = {"linear": fit_linear(points, roofline)}
    with contextlib.suppress(InputError):
        fitted["physical"] = physical = fit_physical(points, roofline)
        fitted["stairs"] = fit_stairs(points, physical)
    return fitted


def smoothed_steps(points: Points, calibration: Calibration, roofline: Roofline) -> tuple[str, ...]:
    """One text for each step over rows that the calibration smooths over, the largest first.

    Also for a rise between distant row counts that exceeds their ratio: somewhere between, one
    more row costs far more than those before, and any calibration spreads that.
    """
    steps: dict[tuple[int, int], tuple[float, str]] = {}
    for here in choices(points):
        p = points.take(here)
        fitted_s = calibration.predict_s(p.rows, p.context, p.batch)
        bound_s = roofline.with_count("physical").seconds(p.rows, p.context, p.batch)
        rises = (np.diff(np.log(seconds)) for seconds in (p.seconds, fitted_s, bound_s))
        noise = _STEP_ERRORS * np.hypot(p.median_error[:-1], p.median_error[1:])
        for at, (rise, fitted, bound) in enumerate(zip(*rises, strict=True)):
            low, high = int(p.rows[at]), int(p.rows[at + 1])
            excess = rise - bound
            spread = high > low + 1 and rise - noise[at] > np.log(high / low)
            followed = fitted - bound >= _FOLLOWED * excess and not spread
            if followed or excess <= max(_STEP, noise[at]):
                continue
            fit = "spreads over those between" if spread else f"takes for {np.expm1(fitted):.0%}"
            text = (
                f"from {low} to {high} rows on {p.context[at]:.0f} tokens the time rises by"
                f" {np.expm1(rise):.0%}, of the roofline by {np.expm1(bound):.0%}; the calibration"
                f" {fit}"
            )
            steps[low, high] = max((float(excess), text), steps.get((low, high), (0.0, "")))
    return tuple(text for _, text in sorted(steps.values(), reverse=True)[:_NAMED_STEPS])
