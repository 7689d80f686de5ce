"""Numba compilation that also works where no directory is writable."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])


def jit(function: F) -> F:
    """Compile `function` with numba, cached on disk where a directory is writable.

    `njit(cache=True)` raises RuntimeError when it finds no writable directory (a
    read-only install, a container without a home), so that case compiles uncached.
    """
    try:
        return cast(F, numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:
        return cast(F, numba.njit(nogil=True)(function))
