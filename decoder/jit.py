"""Functions compiled by numba."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar, cast

import numba
from numba.core import event

F = TypeVar("F", bound=Callable[..., object])

_FUNCTIONS: set[object] = set()


def jit(function: F, *, fastmath: frozenset[str] = frozenset()) -> F:
    """Compile `function` with numba, cached on disk where a directory is writable.

    `njit(cache=True)` raises RuntimeError if it finds no writable directory (a read-only
    install, a container without a home); the function is then compiled without a cache.
    """
    _FUNCTIONS.add(function)
    try:
        return cast(F, numba.njit(cache=True, nogil=True, fastmath=set(fastmath))(function))
    except RuntimeError:
        return cast(F, numba.njit(nogil=True, fastmath=set(fastmath))(function))


def jit_sums(function: F) -> F:
    """`jit` for sums and largest numbers, whose terms are taken side by side; none is NaN."""
    return jit(function, fastmath=frozenset({"reassoc", "nnan", "nsz", "contract"}))


class FirstCompile(event.Listener):  # type: ignore[misc]
    """Says once that functions of `jit` are compiled: a first start takes some seconds longer."""

    said = False

    def on_start(self, compiled: event.Event) -> None:
        if not self.said and compiled.data["dispatcher"].py_func in _FUNCTIONS:
            self.said = True
            text = "compiling the decoder's inner loops: a first start takes some seconds longer"
            logging.getLogger(__name__).warning(text)

    def on_end(self, compiled: event.Event) -> None:
        """Nothing is left to say."""


event.register("numba:compile", FirstCompile())
