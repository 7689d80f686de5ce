"""`rooftree calibrate fleet`: each kind of GPU of a Ray cluster."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from profiler.commands.calibrate import replaces, stored_lines, stored_record
from profiler.commands.options import json_option, target_option

if TYPE_CHECKING:
    from integrations.ray.fleet import FleetDevice, FleetListener, FleetOutcome, JobState


@click.command(name="fleet", short_help="Measure each kind of GPU of a Ray cluster.")
@click.argument("address", default="auto", metavar="[HOST:PORT]")
@target_option
@click.option("--device", type=click.Choice(["cpu", "cuda"]),
              help="Kind of device [default: CUDA where there is one].")  # fmt: skip
@json_option
@click.pass_context
def command(ctx: click.Context, address: str, as_json: bool, **options: Any) -> None:
    """Measure each distinct kind of GPU of a Ray cluster, and store the profiles here.

    HOST:PORT is the cluster's head; the default is the one that runs. Needs
    `pip install 'rooftree[fleet]'` on every node. The profiles of other kinds are
    stored where one kind fails, and the exit code tells it.
    """
    from costmodel.errors import MeasurementError
    from integrations.ray.cluster import ray_cluster
    from integrations.ray.fleet import calibrate_fleet
    from profiler.calibrate.files import check_writable
    from profiler.calibrate.source import CalibrationSettings
    from profiler.report.console import print_json

    check_writable(None)
    # Ray reports lost nodes on stdout, which belongs to the result.
    with (
        contextlib.redirect_stdout(sys.stderr),
        _listener() as listener,
        ray_cluster(CalibrationSettings(**options), address, listener.say) as cluster,
    ):
        outcomes = calibrate_fleet(cluster, listener)
    records = [_record(outcome, replaces(ctx)) for outcome in outcomes]
    if as_json:
        print_json({"kinds": records})
    else:
        for record in records:
            click.echo(f"{record['kind']}, {record['attempts']} attempt(s)")
            if "problem" in record:
                click.echo(f"  no profile: {record['problem']}")
                continue
            for warning in record["warnings"]:
                click.echo(f"  warning: {warning}")
            for line in stored_lines(record):
                click.echo(f"  {line}")
    failed = [
        record["kind"] for record in records if record.get("grade", "do not use") == "do not use"
    ]
    if failed:
        raise MeasurementError(
            f"{len(failed)} of {len(records)} kinds gave no profile to use: {'; '.join(failed)}",
            hint="Run the same command again for them; the other profiles are stored",
        )


@contextlib.contextmanager
def _listener() -> Iterator[FleetListener]:
    """Messages on stderr, and a bar for each kind on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    from integrations.ray.fleet import FleetListener, label

    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        tasks: dict[int, Any] = {}

        def progress(kind: int, device: FleetDevice, state: JobState) -> None:
            if kind not in tasks:
                name = label(device.fingerprint)
                tasks[kind] = bars.add_task(name, total=1.0, state=state.text)
            bars.update(tasks[kind], completed=state.share, state=f"{device.host}: {state.text}")

        yield FleetListener(say=console.print, progress=progress)


def _record(outcome: FleetOutcome, replace: bool) -> dict[str, Any]:
    """The stable JSON form of one kind; stores its profile."""
    from integrations.ray.fleet import label
    from profiler.calibrate.files import store

    record: dict[str, Any] = {"kind": label(outcome.fingerprint), "attempts": outcome.attempts}
    if outcome.device is not None:
        record |= {"host": outcome.device.host, "device": outcome.device.device}
    if outcome.gathered is None:
        return record | {"problem": outcome.problem}
    profile, found = outcome.gathered.profile, {"warnings": list(outcome.gathered.warnings)}
    return record | stored_record(profile, *store(profile, replace=replace)) | found
