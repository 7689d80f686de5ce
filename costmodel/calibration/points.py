"""Measured points, and errors of predictions at them."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import model_validator

from costmodel.errors import InputError
from costmodel.fields import LEAST_S, MOST_S, Count, Section, Statistic
from costmodel.statistics import MAD_TO_SIGMA, MEDIAN_EFFICIENCY

Array = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False, init=False)
class Points:
    """Measured forwards: one-dimensional arrays of one length, in any order.

    rows     new tokens a sequence, at least 1
    context  cached tokens, at least 0
    batch    sequences, at least 1
    seconds  median of the samples, in the range of `fields.Seconds`
    mad_s    median absolute deviation of the samples; NaN where they were too few
    n        number of samples
    Raises InputError.
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
        mad_s: ArrayLike | None = None,
        n: ArrayLike = 1,
    ) -> None:
        length = np.size(np.asarray(seconds))
        columns = {"rows": rows, "context": context, "seconds": seconds, "batch": batch, "n": n}
        for name, values in columns.items():
            object.__setattr__(self, name, _column(name, values, length))
        spread = np.full(length, np.nan) if mad_s is None else _spread(mad_s, length)
        object.__setattr__(self, "mad_s", spread)
        for name, least in (("rows", 1), ("context", 0), ("batch", 1), ("n", 1)):
            if np.any(getattr(self, name) < least):
                raise InputError(f"{name} of every point must be at least {least}")
        if np.any(self.seconds < LEAST_S) or np.any(self.seconds > MOST_S):
            raise InputError(f"seconds of every point must be from {LEAST_S:g} to {MOST_S:g}")

    def __len__(self) -> int:
        return len(self.seconds)

    def take(self, which: ArrayLike) -> Points:
        """The points at an index array or under a mask."""
        index = np.asarray(which)
        return Points(
            **{field.name: getattr(self, field.name)[index] for field in dataclasses.fields(self)}
        )

    def sorted(self) -> Points:
        """The same points in the order of a profile: by batch, then context, then rows."""
        return self.take(np.lexsort((self.rows, self.context, self.batch)))

    @property
    def median_error(self) -> Array:
        """Standard error of each median as a share of it; 0 where the spread is unknown.

        The standard deviation is estimated from the MAD, as for normal samples.
        """
        spread = np.nan_to_num(self.mad_s, nan=0.0)
        error: Array = MAD_TO_SIGMA * MEDIAN_EFFICIENCY * spread / np.sqrt(self.n) / self.seconds
        return error


class ErrorSummary(Section):
    """Relative errors |predicted - measured| / measured over some points, as fractions."""

    points: Count
    mape: Statistic
    median: Statistic
    p95: Statistic
    worst: Statistic

    @model_validator(mode="after")
    def _check(self) -> ErrorSummary:
        if not self.median <= self.p95 <= self.worst or self.mape > self.worst:
            raise ValueError("median, p95 and worst must ascend, and mape not exceed worst")
        return self

    @classmethod
    def of(cls, predicted_s: ArrayLike, measured_s: ArrayLike) -> ErrorSummary:
        """Summarise predictions. Raises InputError for empty, unequal or impossible arrays."""
        predicted = np.asarray(predicted_s, dtype=np.float64).ravel()
        measured = np.asarray(measured_s, dtype=np.float64).ravel()
        if not len(measured) or predicted.shape != measured.shape:
            raise InputError("errors need as many predictions as measurements, and at least one")
        if not np.all(np.isfinite(predicted)) or not np.all(measured > 0):
            raise InputError("errors need finite predictions and measurements above 0")
        error = np.abs(predicted - measured) / measured
        return cls(
            points=len(error),
            mape=min(float(np.mean(error)), float(np.max(error))),  # but for rounding
            median=float(np.median(error)),
            p95=float(np.quantile(error, 0.95)),
            worst=float(np.max(error)),
        )


def _column(name: str, values: ArrayLike, length: int) -> Array:
    column = _floats(name, values)
    if column.ndim == 0 and name in ("batch", "n"):
        column = np.full(length, float(column))
    if column.ndim != 1 or len(column) != length:
        raise InputError(f"{name} of points must be one list with {length} numbers")
    if not np.all(np.isfinite(column)):
        raise InputError(f"{name} of points must be finite numbers")
    return column


def _spread(values: ArrayLike, length: int) -> Array:
    column = _floats("mad_s", values)
    if column.ndim != 1 or len(column) != length:
        raise InputError(f"mad_s of points must be one list with {length} numbers")
    if np.any(column < 0) or np.any(np.isinf(column)):
        raise InputError("mad_s of points must be at least 0, or NaN where it is not known")
    return column


def _floats(name: str, values: ArrayLike) -> Array:
    try:
        return np.array(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(f"{name} of points must be numbers") from None
