"""`rooftree calibrate`: measure this decoder, or a source of an entry point; write profiles."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from costmodel.plugins import SOURCES
from profiler.commands.options import (
    PluginGroup,
    contexts_option,
    count_option,
    execution_options,
    json_option,
    measuring_options,
    target_option,
)
from profiler.report.console import print_json, print_table, progress

if TYPE_CHECKING:
    from costmodel.profile.profile import Profile
    from profiler.calibrate.run import CalibrationResult
    from profiler.calibrate.source import CalibrationSettings, CalibrationSource


class Sources(PluginGroup):
    """Other sources of a calibration."""

    entry_points, anywhere = SOURCES, "--replace"


@click.group(
    name="calibrate", cls=Sources, invoke_without_command=True, subcommand_metavar="[COMMAND]"
)
@target_option
@click.option("--drafter", default="ngram", show_default=True, help="Drafter whose cost to add, as "
              "in generate: ngram, demo, a folder or hub id, A@block=N, or A+B.")  # fmt: skip
@execution_options
@contexts_option
@count_option("--max-nodes", "Nodes of the largest draft tree.", least=3)
@measuring_options("1", "45s, on a CPU 65s")
@click.option("--replace", is_flag=True,
              help="Replace a stored profile that is better, or measured at more.")  # fmt: skip
@json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool, **options: Any) -> None:
    """Measure what a verification step costs on this device and write a profile.

    Times the decoder's own functions over rows x contexts, fits the calibrations,
    checks them on held-out points, and says how far to trust the result. Without
    local weights it takes random ones, which are as fast. An interrupted run loses
    nothing: the same command resumes it.
    """
    if ctx.invoked_subcommand is not None:
        for name in options:
            given = ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
            if given and name != "replace":
                raise click.UsageError(f"Give options after '{ctx.invoked_subcommand}'.")
        return
    from profiler.measure.lock import refuse_if_held

    refuse_if_held(options["device"])
    measure(ctx, None, as_json, options)


def measure(
    ctx: click.Context,
    make: Callable[[CalibrationSettings], CalibrationSource] | None,
    as_json: bool,
    options: dict[str, Any],
) -> None:
    """Calibrate the source that `make` makes (None: this decoder), print its result, and exit.

    What an engine prints on stdout, which belongs to the result, goes to stderr.
    """

    # Messages and progress go to stderr, from before torch is imported.
    with contextlib.redirect_stdout(sys.stderr), progress("measuring") as (say, update):
        from profiler.calibrate.run import CalibrationListener, calibrate
        from profiler.calibrate.source import CalibrationSettings

        settings = CalibrationSettings(**{"replace": replaces(ctx)} | options)
        listener = CalibrationListener(say=say, progress=update)
        result = calibrate(settings, listener, make and make(settings))
    ctx.exit(print_result(result, as_json))


def replaces(ctx: click.Context) -> bool:
    """Whether `--replace` was given to `calibrate`, of which the command is a source."""
    return ctx.parent is not None and bool(ctx.parent.params.get("replace"))


def stored_record(profile: Profile, path: Path, picture: Path, aside: str) -> dict[str, Any]:
    """The stable JSON form of a profile that a calibration has stored."""
    from costmodel.profile.grade import grade
    from profiler.report.profiles import next_command, verdict

    return {
        "path": str(path),
        "picture": str(picture),
        "aside": aside,
        "verdict": verdict(profile),
        "grade": grade(profile).word,
        "next": next_command(profile, path),
    }


def print_result(result: CalibrationResult, as_json: bool) -> int:
    """Print the result; returns the exit code, which is 5 where nobody should use the profile."""
    from costmodel.errors import MeasurementError
    from costmodel.profile.grade import counted
    from profiler.report.profiles import linear_line, surface_table

    profile = result.profile
    record = stored_record(profile, result.path, result.picture, result.aside)
    exit_code = MeasurementError.exit_code if record["grade"] == "do not use" else 0
    if as_json:
        skipped = [task.key() | {"reason": reason} for task, reason in result.skipped.items()]
        measured = {
            "warnings": list(result.warnings),
            "resumed_samples": result.resumed_samples,
            "unmeasured": [task.key() for task in result.unmeasured],
            "skipped": skipped,
            "profile": profile.as_dict(),
        }
        print_json(record | measured)
        return exit_code
    provenance = profile.provenance
    if profile.surface is not None:
        print_table(*surface_table(profile.surface))
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
    click.echo("\n".join(stored_lines(record)))
    return exit_code


def stored_lines(record: dict[str, Any]) -> Iterator[str]:
    yield f"profile: {record['path']}"
    yield f"picture: {record['picture']}"
    if record["aside"]:
        yield (
            f"It did not replace the stored profile, which stays in use: {record['aside']}. "
            "The same command with `--replace` replaces it."
        )
    yield record["verdict"]
    yield f"{record['grade']}: {record['next']}"
