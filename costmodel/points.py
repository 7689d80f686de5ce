"""Measured points and how far a prediction is from them."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.errors import InputError

Array = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False, init=False)
class Points:
    """Seconds of forwards: one-dimensional arrays of one length, in any order.

    rows >= 1 new tokens a sequence, context >= 0 cached tokens, batch >= 1 sequences,
    seconds > 0 (the median of a point's samples). `mad_s` is the median absolute deviation of
    the samples, NaN where there were too few; `n` is their number. Raises InputError.
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
        given = {"rows": rows, "context": context, "seconds": seconds, "batch": batch, "n": n}
        for name, values in given.items():
            object.__setattr__(self, name, _column(name, values, length))
        spread = np.full(length, np.nan) if mad_s is None else _spread(mad_s, length)
        object.__setattr__(self, "mad_s", spread)
        for name, least in (("rows", 1), ("context", 0), ("batch", 1), ("n", 1)):
            if np.any(getattr(self, name) < least):
                raise InputError(f"{name} of every point must be at least {least}")
        if np.any(self.seconds <= 0):
            raise InputError("seconds of every point must be above 0")

    def __len__(self) -> int:
        return len(self.seconds)

    def take(self, which: ArrayLike) -> Points:
        """The points that an index array or a mask picks."""
        index = np.asarray(which)
        return Points(
            **{field.name: getattr(self, field.name)[index] for field in dataclasses.fields(self)}
        )

    def sorted(self) -> Points:
        """The same points in the order of a profile: by batch, then context, then rows."""
        return self.take(np.lexsort((self.rows, self.context, self.batch)))

    @property
    def median_error(self) -> Array:
        """Standard error of each median as a share of it; 0 where the spread is not known.

        1.4826 MAD estimates a normal standard deviation; a median of n samples has
        sqrt(pi / 2) / sqrt(n) of it.
        """
        spread = np.nan_to_num(self.mad_s, nan=0.0)
        error: Array = 1.4826 * 1.2533 * spread / np.sqrt(self.n) / self.seconds
        return error


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ErrorSummary:
    """Relative errors |predicted - measured| / measured over some points, as fractions."""

    points: int
    mape: float
    median: float
    p95: float
    worst: float

    @classmethod
    def of(cls, predicted_s: ArrayLike, measured_s: ArrayLike) -> ErrorSummary:
        """Summarise. Raises InputError for empty, unequal or impossible arrays."""
        predicted = np.asarray(predicted_s, dtype=np.float64).ravel()
        measured = np.asarray(measured_s, dtype=np.float64).ravel()
        if not len(measured) or predicted.shape != measured.shape:
            raise InputError("errors need as many predictions as measurements, and at least one")
        if not np.all(np.isfinite(predicted)) or not np.all(measured > 0):
            raise InputError("errors need finite predictions and measurements above 0")
        error = np.abs(predicted - measured) / measured
        return cls(
            points=len(error),
            mape=float(np.mean(error)),
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
