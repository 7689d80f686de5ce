"""Predictions that are made one context and batch at a time, for arguments of any shape."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def predict_slices(
    slice_s: Callable[[Array, float, float], Array],
    rows: ArrayLike,
    context: ArrayLike,
    batch: ArrayLike,
) -> Array:
    """Seconds in the broadcast shape of the arguments.

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
