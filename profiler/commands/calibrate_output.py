"""The progress bar of a calibration, and its result as tables or JSON."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from profiler.calibrate.run import CalibrationListener, CalibrationResult


def replaces(ctx: click.Context) -> bool:
    """Whether `--replace` was given to `calibrate`, of which the command is a source."""
    return ctx.parent is not None and bool(ctx.parent.params["replace"])


@contextlib.contextmanager
def listening() -> Iterator[CalibrationListener]:
    """Messages and progress on stderr, from before torch is imported."""
    from profiler.report.progress import progress

    with progress("measuring") as shown:
        from profiler.calibrate.run import CalibrationListener

        yield CalibrationListener(
            say=shown.say, progress=lambda state: shown.update(state.share, state.text)
        )


def to_record(result: CalibrationResult) -> dict[str, Any]:
    """The stable JSON form of a calibration's result."""
    from costmodel.profile.grade import grade
    from profiler.report.profiles import next_command, verdict

    return {
        "path": str(result.path),
        "picture": str(result.picture),
        "verdict": verdict(result.profile),
        "grade": grade(result.profile).word,
        "next": next_command(result.profile, result.path),
        "aside": result.aside,
        "warnings": list(result.warnings),
        "resumed_samples": result.resumed_samples,
        "unmeasured": [task.key() for task in result.unmeasured],
        "skipped": [task.key() | {"reason": reason} for task, reason in result.skipped.items()],
        "profile": result.profile.as_dict(),
    }


def print_result(result: CalibrationResult, as_json: bool) -> int:
    """Print the result; returns the exit code, which is 5 where nobody should use the profile."""
    from costmodel.errors import MeasurementError
    from costmodel.profile.grade import counted, grade
    from profiler.report.console import print_json
    from profiler.report.profiles import linear_line, next_command, print_surface, verdict

    profile, mark = result.profile, grade(result.profile)
    exit_code = MeasurementError.exit_code if mark.word == "do not use" else 0
    if as_json:
        print_json(to_record(result))
        return exit_code
    provenance = profile.provenance
    if profile.surface is not None:
        print_surface(profile.surface)
    click.echo(
        f"{counted(provenance.points, 'point')} from {counted(provenance.samples, 'sample')} in "
        f"{provenance.duration_s:.0f} s ({provenance.discarded_samples} discarded); "
        f"selected calibration: {profile.calibration.selected}"
    )
    click.echo(linear_line(profile))
    if result.skipped:
        click.echo(f"{counted(len(result.skipped), 'point')} did not fit into memory")
    if result.unmeasured:
        click.echo(f"{counted(len(result.unmeasured), 'point')} did not fit the time budget")
    click.echo(f"profile: {result.path}")
    click.echo(f"picture: {result.picture}")
    if result.aside:
        click.echo(aside_line(result.aside))
    click.echo(verdict(profile))
    click.echo(f"{mark.word}: {next_command(profile, result.path)}")
    return exit_code


def aside_line(reason: str) -> str:
    """The sentence that tells that a profile was put aside."""
    return (
        f"It did not replace the stored profile, which stays in use: {reason}. "
        "The same command with `--replace` replaces it."
    )
