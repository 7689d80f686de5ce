"""Errors that a user can act on.

Every error carries the problem and, where there is one, a hint what to do next. The command
line catches `RooftreeError` once, prints both and exits with the exit code of the class.
Nothing else in the project prints errors.
"""

from __future__ import annotations

from typing import Self

# Letters of a message and of its hint; what a file or an argument holds may be far longer.
LONGEST, LONGEST_HINT = 680, 450
EXIT_OUTPUT = 6  # of an output that cannot be written, whatever the kind of its error


class RooftreeError(Exception):
    """Base of all errors that a user can act on."""

    exit_code = 1

    def __init__(self, problem: str, *, hint: str = "") -> None:
        hint = _shortened(hint, LONGEST_HINT)
        problem = _shortened(problem, LONGEST - len(hint))
        super().__init__(problem)
        self.problem = problem
        self.hint = hint

    def of_output(self) -> Self:
        """The same error, of an output that cannot be written."""
        self.exit_code = EXIT_OUTPUT
        return self

    def __str__(self) -> str:
        return f"{self.problem}. {self.hint}" if self.hint else self.problem


def shown(value: object) -> str:
    """A value as a message shows it: its repr, short."""
    try:
        return _shortened(repr(value), 80)
    except Exception:  # of a class of somebody else's, or a number of thousands of digits
        return f"a {type(value).__name__} that cannot be shown"


def reason_of(error: BaseException) -> str:
    """An error's kind and the first line of its text, short; errors of any class have one."""
    try:
        first = next(iter(str(error).strip().splitlines()), "")
    except Exception:  # of a class of somebody else's
        first = ""
    return _shortened(f"{type(error).__name__}: {first}" if first else type(error).__name__, 300)


def _shortened(text: str, most: int) -> str:
    """The text, without its middle where it is longer than `most`."""
    half = most // 2
    return text if len(text) <= most else f"{text[: half - 2]} ... {text[-half + 3 :]}"


class InputError(RooftreeError):
    """A bad option, file, prompt or target."""

    exit_code = 2


class ProfileError(RooftreeError):
    """A profile that is missing, invalid or made for something else."""

    exit_code = 3


class DeviceError(RooftreeError):
    """A device that is absent, unsupported or too small."""

    exit_code = 4


class DrafterError(RooftreeError):
    """A drafter that fails or breaks its protocol; the text goes on without it."""

    exit_code = 2


class MeasurementError(RooftreeError):
    """A measurement without a usable result."""

    exit_code = 5
