"""The verdict on one input: accepted, refused in one line, or a failure."""

from __future__ import annotations

import resource
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from costmodel.errors import RooftreeError

LIMIT_S = 20.0  # far above what any input takes on a busy machine
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
    """Use an input, for at most `LIMIT_S`."""

    def ring(number: int, frame: object) -> None:
        raise _Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
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
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
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
