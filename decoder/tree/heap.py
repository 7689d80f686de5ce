"""Compiled functions, and the binary heap that best-first searches share."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar, cast

import numba
from numba.core import event

F = TypeVar("F", bound=Callable[..., object])


class _FirstCompile(event.Listener):  # type: ignore[misc]
    """Says once that functions are compiled: a first start takes some seconds longer."""

    said = False

    def on_start(self, compiled: event.Event) -> None:
        ours = compiled.data["dispatcher"].py_func.__module__.startswith(("decoder", "lab"))
        if ours and not self.said:
            self.said = True
            text = "compiling the decoder's inner loops: a first start takes some seconds longer"
            logging.getLogger(__name__).warning(text)

    def on_end(self, compiled: event.Event) -> None:
        """Nothing is left to say."""


event.register("numba:compile", _FirstCompile())


def jit(function: F, *, parallel: bool = False) -> F:
    """Compile `function` with numba, cached on disk where a directory is writable.

    `njit(cache=True)` raises RuntimeError if it finds no writable directory (a read-only
    install, a container without a home); the function is then compiled without a cache.
    """
    try:
        return cast(F, numba.njit(cache=True, nogil=True, parallel=parallel)(function))
    except RuntimeError:
        return cast(F, numba.njit(nogil=True, parallel=parallel)(function))


@jit
def sift_down(keys, items, size):  # type: ignore[no-untyped-def]
    """Restore a binary heap, the largest key on top, after its top entry has changed.

    The heap is two arrays: keys and items [size].
    """
    hole, key, item = 0, keys[0], items[0]
    while True:
        below = 2 * hole + 1
        if below >= size:
            break
        if below + 1 < size and keys[below + 1] > keys[below]:
            below += 1
        if keys[below] <= key:
            break
        keys[hole] = keys[below]
        items[hole] = items[below]
        hole = below
    keys[hole] = key
    items[hole] = item


@jit
def sift_up(keys, items, hole):  # type: ignore[no-untyped-def]
    """Restore a binary heap after an entry was added at `hole`, its end."""
    key, item = keys[hole], items[hole]
    while hole > 0:
        above = (hole - 1) // 2
        if keys[above] >= key:
            break
        keys[hole] = keys[above]
        items[hole] = items[above]
        hole = above
    keys[hole] = key
    items[hole] = item
