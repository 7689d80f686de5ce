"""Functions compiled by numba, and threads that share the work of one by claims.

Shared work is a row of phases, each of so many parts. Who comes claims the next parts of a phase
until none is left, and goes on when all are done. The caller never waits for a thread to start: one
that comes late finds less to do, or nothing. So a busy machine costs a product its share, no more.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, event
from numba.extending import intrinsic
from numpy.typing import NDArray

F = TypeVar("F", bound=Callable[..., object])

_FUNCTIONS: set[object] = set()
LINE = 8  # counters of a cache line: each is alone in one
PATIENCE = 2000  # looks at a counter before a waiting thread lets others run

Claims = NDArray[np.int64]


def jit(function: F) -> F:
    """Compile `function` with numba, cached on disk unless no directory is writable."""
    _FUNCTIONS.add(function)
    options = {"nogil": True, "no_cfunc_wrapper": True}
    try:
        compiled = numba.njit(cache=True, **options)(function)
    except RuntimeError:
        return cast(F, numba.njit(**options)(function))
    # numba looks for changes in the function's own file; inner ones are in others of the folder.
    files, folder = compiled._cache._cache_file, Path(function.__code__.co_filename).parent
    files._source_stamp = files._source_stamp, max(f.stat().st_mtime for f in folder.glob("*.py"))
    return cast(F, compiled)


def jit_inner(function: F, *, fastmath: frozenset[str] = frozenset()) -> F:
    """`jit` for a function that compiled ones call alone, in whose cached code it is.

    It divides by 0 without an error: a check would keep loops from being widened.
    """
    options = {"nogil": True, "no_cfunc_wrapper": True, "no_cpython_wrapper": True}
    return cast(F, numba.njit(fastmath=set(fastmath), error_model="numpy", **options)(function))


def jit_sums(function: F) -> F:
    """`jit_inner` for sums and largest numbers, whose terms are taken side by side, no NaN."""
    return jit_inner(function, fastmath=frozenset({"reassoc", "nnan", "nsz", "contract"}))


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


def run_shared(function: Callable[..., object], *arguments: Any, phases: int, threads: int) -> None:
    """Call function(*arguments, claims, threads) here and in so many threads less one.

    claims  int64 [phases, 2, LINE], zeros
    """
    claims: Claims = np.zeros((phases, 2, LINE), np.int64)
    while len(_all) < threads - 1:
        _all.append(_Helper())
    for helper in _all[: threads - 1]:
        helper.ask(function, (*arguments, claims, threads))
    function(*arguments, claims, threads)


class _Helper:
    """A thread that runs the last function it was asked to."""

    def __init__(self) -> None:
        self._asked = threading.Lock()
        self._asked.acquire()
        self._call: tuple[Callable[..., object], tuple[Any, ...]] | None = None
        threading.Thread(target=self._serve, daemon=True).start()

    def ask(self, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self._call = function, arguments
        with suppress(RuntimeError):  # it was asked already
            self._asked.release()

    def _serve(self) -> None:
        while True:
            self._asked.acquire()
            call, self._call = self._call, None
            if call is not None:
                call[0](*call[1])


_all: list[_Helper] = []
if hasattr(os, "register_at_fork"):  # a child process has none of the threads
    os.register_at_fork(after_in_child=_all.clear)


def _pointer(context: Any, builder: Any, signature: Any, values: Any) -> Any:
    array = context.make_array(signature.args[0])(context, builder, values[0])
    return builder.gep(array.data, [values[1]])


@intrinsic
def _add(typing: Any, claims: Any, place: Any, amount: Any) -> Any:
    """The counter at a place before the amount is added to it."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = _pointer(context, builder, signature, values)
        return builder.atomic_rmw("add", pointer, values[2], "seq_cst")

    return numba.types.int64(claims, place, amount), emit


@intrinsic
def _look(typing: Any, claims: Any, place: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load_atomic(_pointer(context, builder, signature, values), "acquire", 8)

    return numba.types.int64(claims, place), emit


@intrinsic
def _let_others_run(typing: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if os.name == "posix":
            kind = ir.FunctionType(ir.IntType(32), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return numba.types.void(), emit


@jit_inner
def parts_of(claims: Claims, phase: int, parts: int, share: int) -> Iterator[int]:
    """Yield the parts of a phase that the caller has to do, until all are done.

    It takes the `share`-th part of those that are left together, so few at the end, and all
    threads end at about the same time.
    """
    claimed, done, looks, first = 2 * phase * LINE, (2 * phase + 1) * LINE, 0, 0
    while first < parts:
        size = max((parts - _look(claims, claimed)) // share, 1)
        first = _add(claims, claimed, size)
        last = min(first + size, parts)
        for part in range(first, last):  # noqa: UP028 - numba has no `yield from`
            yield part
        _add(claims, done, max(last - first, 0))
    while _look(claims, done) < parts:
        looks += 1
        if looks % PATIENCE == 0:
            _let_others_run()
