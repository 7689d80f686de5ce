"""The progress bar of a calibration, and its result as tables or JSON."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from profiler.calibrate.run import CalibrationListener, CalibrationResult


@contextlib.contextmanager
def listening() -> Iterator[CalibrationListener]:
    """Messages on stderr, and a bar on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    from profiler.calibrate.run import CalibrationListener

    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    columns = (TextColumn("measuring"), BarColumn(), TextColumn("{task.fields[state]}"))
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("measuring", total=1.0, state="loading the target")
        yield CalibrationListener(
            say=console.print,
            progress=lambda progress: bar.update(
                task, completed=progress.share, state=progress.text
            ),
        )


def to_record(result: CalibrationResult) -> dict[str, Any]:
    """The stable JSON form of a calibration's result."""
    from profiler.report.profiles import verdict

    return {
        "path": str(result.path),
        "picture": str(result.picture),
        "verdict": verdict(result.profile),
        "warnings": list(result.warnings),
        "resumed_samples": result.resumed_samples,
        "unmeasured": [task.key() for task in result.unmeasured],
        "skipped": [task.key() | {"reason": reason} for task, reason in result.skipped.items()],
        "profile": result.profile.as_dict(),
    }


def print_result(result: CalibrationResult, as_json: bool) -> None:
    from profiler.report.console import print_json
    from profiler.report.profiles import linear_line, print_surface, verdict

    if as_json:
        print_json(to_record(result))
        return
    profile = result.profile
    provenance = profile.provenance
    if profile.surface is not None:
        print_surface(profile.surface)
    click.echo(
        f"{provenance.points} points from {provenance.samples} samples in "
        f"{provenance.duration_s:.0f} s ({provenance.discarded_samples} discarded); "
        f"selected calibration: {profile.calibration.selected}"
    )
    click.echo(linear_line(profile))
    if result.skipped:
        click.echo(f"{len(result.skipped)} points did not fit into memory")
    if result.unmeasured:
        click.echo(f"{len(result.unmeasured)} points did not fit the time budget")
    click.echo(f"profile: {result.path}")
    click.echo(f"picture: {result.picture}")
    click.echo(verdict(profile))
