"""Measured points, the interface of every calibration, and errors of predictions at points."""

from __future__ import annotations

import dataclasses
from typing import Literal, Protocol, Self

import numpy as np
from numpy.typing import ArrayLike
from pydantic import PrivateAttr

from costmodel.fields import Count, Section, Statistic
from costmodel.roofline import Roofline
from costmodel.statistics import MAD_TO_SIGMA, MEDIAN_EFFICIENCY, Array

CalibrationName = Literal["linear", "physical", "stairs"]
CALIBRATIONS: tuple[CalibrationName, ...] = ("linear", "physical", "stairs")
_COMMON_SAMPLES = 6  # that the spread of all points counts for at each point


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False, init=False)
class Points:
    """Measured forwards: one-dimensional arrays of one length, in any order.

    rows     new tokens a sequence, at least 1
    context  cached tokens, at least 0
    batch    sequences, at least 1
    seconds  median of the samples, in the range of `fields.Seconds`
    mad_s    median absolute deviation of the samples; NaN where they were too few
    n        number of samples
    """

    rows: Array
    context: Array
    seconds: Array
    batch: Array
    mad_s: Array
    n: Array

    def __init__(
        self,
        *,
        rows: ArrayLike,
        context: ArrayLike,
        seconds: ArrayLike,
        batch: ArrayLike = 1,
        mad_s: ArrayLike = np.nan,
        n: ArrayLike = 1,
    ) -> None:
        columns = {"rows": rows, "context": context, "seconds": seconds, "batch": batch}
        for name, values in (columns | {"mad_s": mad_s, "n": n}).items():
            column = np.broadcast_to(np.asarray(values, dtype=np.float64), np.shape(seconds))
            object.__setattr__(self, name, np.array(column))

    def __len__(self) -> int:
        return len(self.seconds)

    def take(self, which: ArrayLike) -> Points:
        index = np.asarray(which)
        return Points(
            **{field.name: getattr(self, field.name)[index] for field in dataclasses.fields(self)}
        )

    def sorted(self) -> Points:
        """The same points in the order of a profile: by batch, then context, then rows."""
        return self.take(np.lexsort((self.rows, self.context, self.batch)))

    @property
    def median_error(self) -> Array:
        """Standard error of each median as a share of it; 0 where no spread is known.

        The standard deviation of a sample is estimated from the MAD, as for normal samples. Few
        samples lie close together by chance: a point's variance counts for its samples, and the
        median variance of all points for `_COMMON_SAMPLES` more.
        """
        spread = MAD_TO_SIGMA * self.mad_s / self.seconds
        if np.all(np.isnan(spread)):
            return np.zeros(len(self))
        common = float(np.nanmedian(spread)) ** 2
        weight = np.where(np.isnan(spread), 0.0, self.n)
        variance = weight * np.nan_to_num(spread) ** 2 + _COMMON_SAMPLES * common
        error: Array = MEDIAN_EFFICIENCY * np.sqrt(
            variance / (weight + _COMMON_SAMPLES) / np.maximum(self.n, 1)
        )
        return error


class ErrorSummary(Section):
    """Relative errors |predicted - measured| / measured over some points, as fractions."""

    points: Count
    mape: Statistic
    median: Statistic
    p95: Statistic
    worst: Statistic

    @classmethod
    def of(cls, predicted_s: ArrayLike, measured_s: ArrayLike) -> ErrorSummary:
        predicted = np.asarray(predicted_s, dtype=np.float64).ravel()
        measured = np.asarray(measured_s, dtype=np.float64).ravel()
        error = np.abs(predicted - measured) / measured
        return cls(
            points=len(error),
            mape=float(np.mean(error)),
            median=float(np.median(error)),
            p95=float(np.quantile(error, 0.95)),
            worst=float(np.max(error)),
        )


class Calibration(Protocol):
    """Seconds of a forward by rows, context and batch."""

    def predict_s(self, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1) -> Array:
        """Seconds in the broadcast shape of the arguments."""


class RooflineCalibration(Section):
    """Coefficients over a roofline: the fields are those of the profile's YAML.

    The roofline is not stored, since a profile's device and target give it; `over` sets it.
    """

    _roofline: Roofline = PrivateAttr()

    def over(self, roofline: Roofline) -> Self:
        placed = self.model_copy()
        placed._roofline = roofline
        return placed

    @property
    def roofline(self) -> Roofline:
        return self._roofline

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in type(self).model_fields)
