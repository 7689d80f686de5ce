"""The interface of every calibration, and the base of those that are coefficients alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Literal, Protocol, Self

import numpy as np
from numpy.typing import ArrayLike
from pydantic import PrivateAttr

from costmodel.errors import InputError
from costmodel.fields import Section
from costmodel.roofline import Roofline
from costmodel.statistics import Array

CalibrationName = Literal["linear", "physical", "stairs"]
CALIBRATIONS: tuple[CalibrationName, ...] = ("linear", "physical", "stairs")


class Calibration(Protocol):
    """Seconds of a forward by rows, context and batch."""

    def predict_s(self, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1) -> Array:
        """Seconds in the broadcast shape of the arguments."""


class RooflineCalibration(Section):
    """Coefficients over a roofline: the fields are those of the profile's YAML.

    The roofline itself is not stored, since a profile's device and target give it; `over` sets
    it. Two calibrations are equal where their fields are.
    """

    _roofline: Roofline | None = PrivateAttr(default=None)

    def over(self, roofline: Roofline) -> Self:
        """The same coefficients over this roofline."""
        placed = self.model_copy()
        placed._roofline = roofline
        return placed

    @property
    def roofline(self) -> Roofline:
        """The roofline that the coefficients multiply. Raises InputError where none is set."""
        if self._roofline is None:
            raise InputError(f"{type(self).__name__} has no roofline: set one with `over`")
        return self._roofline

    @abstractmethod
    def predict_s(self, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1) -> Array:
        """Seconds in the broadcast shape of the arguments."""

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in type(self).model_fields)


def predict_slices(
    slice_s: Callable[[Array, float, float], Array],
    rows: ArrayLike,
    context: ArrayLike,
    batch: ArrayLike,
) -> Array:
    """Seconds in the broadcast shape of the arguments, one context and batch at a time.

    slice_s(rows, context, batch) gives the seconds of any rows at one context and batch; it
    is called once for each pair that occurs.
    """
    r = np.asarray(rows, dtype=np.float64)
    if np.ndim(context) == 0 and np.ndim(batch) == 0:
        return slice_s(r, float(np.asarray(context)), float(np.asarray(batch)))
    r, c, b = np.broadcast_arrays(r, np.asarray(context, float), np.asarray(batch, float))
    result = np.empty(r.shape)
    settings = np.stack([c.ravel(), b.ravel()], axis=1)
    pairs, which = np.unique(settings, axis=0, return_inverse=True)
    which = which.reshape(r.shape)
    for index, (one_context, one_batch) in enumerate(pairs):
        chosen = which == index
        result[chosen] = slice_s(r[chosen], float(one_context), float(one_batch))
    return result
