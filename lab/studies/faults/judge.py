"""The verdict on one input: accepted, refused in one line, or a failure."""

from __future__ import annotations

import contextlib
import resource
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from costmodel.errors import RooftreeError

LIMIT_CPU_S = 20.0  # of this process: a busy machine makes no hang
LIMIT_WALL_S = 300.0  # for what waits without computing, as on a pipe that nobody writes to
MEMORY_BYTES = 12 << 30
LONGEST_MESSAGE = 700

Outcome = Literal["accepted", "refused", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of one input; `reason` groups failures of one cause."""

    outcome: Outcome
    reason: str = ""


class Wrong(Exception):
    """An accepted input that gave a wrong text, lost a sample or left a broken file."""


class _Hang(BaseException):
    """Raised by the alarm; no handler of exceptions catches it."""


def judge(use: Callable[[], Any]) -> Verdict:
    """Use an input within the limits."""
    with contextlib.ExitStack() as limits:
        limits.enter_context(_limited(signal.ITIMER_PROF, signal.SIGPROF, LIMIT_CPU_S))
        limits.enter_context(_limited(signal.ITIMER_REAL, signal.SIGALRM, LIMIT_WALL_S))
        return _judge(use)


@contextlib.contextmanager
def _limited(timer: int, number: signal.Signals, limit_s: float) -> Iterator[None]:
    """Raise `_Hang` in the body once this timer of the process has run for so long."""

    def ring(number: int, frame: object) -> None:
        raise _Hang

    before = signal.signal(number, ring)
    signal.setitimer(timer, limit_s)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, before)


def _judge(use: Callable[[], Any]) -> Verdict:
    try:
        use()
    except RooftreeError as error:
        return _refused(error)
    except Wrong as error:
        return Verdict(outcome="failed", reason=f"wrong: {error}")
    except _Hang as error:
        return Verdict(outcome="failed", reason=f"hang {_place(error)}")
    except BaseException as error:  # panics of Rust are no Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        return Verdict(outcome="failed", reason=f"{type(error).__name__} {_place(error)}")
    return Verdict(outcome="accepted")


def limit_memory() -> None:
    """End allocations beyond `MEMORY_BYTES` with a MemoryError, in this process."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def _refused(error: RooftreeError) -> Verdict:
    if len(str(error)) > LONGEST_MESSAGE:
        return Verdict(outcome="failed", reason=f"message of {len(str(error))} {_place(error)}")
    return Verdict(outcome="refused")


def _place(error: BaseException) -> str:
    """The innermost line of this project that an exception came through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "/site-packages/" not in f.filename and "/lib/" not in f.filename]
    last = (ours or frames)[-1]
    parts = last.filename.split("/")
    return f"in {'/'.join(parts[-2:])}:{last.lineno} {last.name}"
