"""Errors that a user can act on.

Every error carries what was wrong and, where there is one, what to do next.
The command line catches `RooftreeError` once, prints both and exits with the
class's exit code; nothing else in the project prints errors.
"""

from __future__ import annotations


class RooftreeError(Exception):
    """Base of all errors that a user can act on."""

    exit_code = 1

    def __init__(self, problem: str, *, hint: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.problem}. {self.hint}" if self.hint else self.problem


class InputError(RooftreeError):
    """A bad option, file, prompt or target."""

    exit_code = 2


class ProfileError(RooftreeError):
    """A profile that is missing, invalid or made for something else."""

    exit_code = 3


class DeviceError(RooftreeError):
    """A device that is unknown, unsupported or too small."""

    exit_code = 4


class MeasurementError(RooftreeError):
    """A measurement that gave no trustworthy number."""

    exit_code = 5
