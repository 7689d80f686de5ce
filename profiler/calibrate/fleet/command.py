"""`rooftree calibrate --fleet`: calibrate a cluster, store the profiles and show them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from costmodel.errors import InputError, MeasurementError
from profiler.calibrate.calibrate import CalibrationSettings
from profiler.calibrate.files import check_writable, store
from profiler.calibrate.fleet.ray_cluster import ray_cluster
from profiler.calibrate.fleet.scheduler import (
    FleetDevice,
    FleetListener,
    FleetOutcome,
    JobState,
    calibrate_fleet,
    label,
)
from profiler.report.console import print_json
from profiler.report.profiles import verdict


def run_fleet(settings: Mapping[str, Any], address: str, *, as_json: bool) -> None:
    """Calibrate every kind of device, store the profiles here, and print them.

    Raises InputError for options that contradict each other. Raises MeasurementError at the
    end when a kind gave no profile; the profiles of the others are stored by then.
    """
    _check(settings)
    check_writable(None)
    # Ray reports lost nodes on stdout, which belongs to the result.
    with (
        contextlib.redirect_stdout(sys.stderr),
        _listener() as listener,
        ray_cluster(CalibrationSettings(**settings), address, listener.say) as cluster,
    ):
        outcomes = calibrate_fleet(cluster, listener)
    records = [_record(outcome) for outcome in outcomes]
    if as_json:
        print_json({"kinds": records})
    else:
        _show(records)
    failed = [record["kind"] for record in records if "problem" in record]
    if failed:
        raise MeasurementError(
            f"{len(failed)} of {len(records)} kinds gave no profile: {'; '.join(failed)}",
            hint="Run the same command again for them; the other profiles are stored",
        )


def _check(settings: Mapping[str, Any]) -> None:
    if settings["output"] is not None:
        raise InputError(
            "--output names one file, but --fleet stores several profiles",
            hint="Leave --output out; set ROOFTREE_HOME to choose their folder",
        )
    if settings["device"] not in (None, "cpu", "cuda"):
        raise InputError(
            f"--fleet chooses the devices itself, so --device cannot be {settings['device']}",
            hint="Use --device cpu or cuda, or leave it out",
        )


@contextlib.contextmanager
def _listener() -> Iterator[FleetListener]:
    """Messages on stderr, and a bar for each kind on a terminal."""
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


def _record(outcome: FleetOutcome) -> dict[str, Any]:
    """The stable JSON form of one kind; stores its profile."""
    record: dict[str, Any] = {"kind": label(outcome.fingerprint), "attempts": outcome.attempts}
    if outcome.device is not None:
        record |= {"host": outcome.device.host, "device": outcome.device.device}
    if outcome.gathered is None:
        return record | {"problem": outcome.problem}
    path, picture = store(outcome.gathered.profile)
    return record | {
        "path": str(path),
        "picture": str(picture),
        "verdict": verdict(outcome.gathered.profile),
        "warnings": list(outcome.gathered.warnings),
    }


def _show(records: Sequence[Mapping[str, Any]]) -> None:
    for record in records:
        click.echo(f"{record['kind']}, {record['attempts']} attempt(s)")
        if "problem" in record:
            click.echo(f"  no profile: {record['problem']}")
            continue
        for warning in record["warnings"]:
            click.echo(f"  warning: {warning}")
        click.echo(f"  profile: {record['path']}")
        click.echo(f"  picture: {record['picture']}")
        click.echo(f"  {record['verdict']}")
