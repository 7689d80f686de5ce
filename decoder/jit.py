"""Numba compilation that also works where no directory is writable."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])


def jit(function: F) -> F:
    """Compile `function` with numba, cached on disk where a directory is writable.

    `njit(cache=True)` raises RuntimeError if it finds no writable directory (a read-only
    install, a container without a home); the function is then compiled without a cache.
    """
    try:
        return cast(F, numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:
        return cast(F, numba.njit(nogil=True)(function))
