"""Numba compilation that also works where no directory is writable."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])


def jit(function: F) -> F:
    """Compile `function` with numba, cached on disk where a directory is writable."""
    return _compiled(function, set())


def jit_sums(function: F) -> F:
    """The same for a function whose sums may be taken in any order, as vector units do."""
    return _compiled(function, {"reassoc"})


def _compiled(function: F, fastmath: set[str]) -> F:
    """`njit(cache=True)` raises RuntimeError if it finds no writable directory.

    So in a read-only install, or in a container without a home; the function is then compiled
    without a cache.
    """
    try:
        return cast(F, numba.njit(cache=True, nogil=True, fastmath=fastmath)(function))
    except RuntimeError:
        return cast(F, numba.njit(nogil=True, fastmath=fastmath)(function))
