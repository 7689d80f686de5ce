"""`rooftree calibrate`: measure this device and write its profile."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click

if TYPE_CHECKING:
    from profiler.calibrate import CalibrationResult
    from profiler.sweep import Progress


class Duration(click.ParamType):
    """Seconds, or a number with s, m or h."""

    name = "duration"
    UNITS_S: ClassVar = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", str(value).strip())
        if match is None or float(match[1]) <= 0:
            self.fail(f"{value!r} is not a duration; write 30s, 2m or 1h.", param, ctx)
        return float(match[1]) * self.UNITS_S[match[2]]


class Numbers(click.ParamType):
    """Whole numbers separated by commas."""

    name = "n,n,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in str(value).split(",")]
        if not all(part.isdecimal() and int(part) > 0 for part in parts):
            self.fail(f"{value!r} is not a list of whole numbers, as 256,1024.", param, ctx)
        return tuple(sorted({int(part) for part in parts}))


@click.command(name="calibrate")
@click.option("--target", help="Folder, hub id or known target [default: fits this device].")
@click.option(
    "--weights",
    type=click.Choice(["auto", "random", "pretrained"]),
    default="auto",
    show_default=True,
    help="auto: local weights where there are some, else random ones (latency is the same).",
)
@click.option(
    "--drafter",
    default="ngram",
    show_default=True,
    help="Drafter whose cost to add, as in generate: ngram, demo, a folder or hub id, A@block=N, "
    "or A+B.",
)
@click.option("--device", help="cpu, cuda or cuda:N [default: CUDA where there is one].")
@click.option("--dtype", help="bfloat16, float16, float32 [default: the device's].")
@click.option(
    "--runtime",
    type=click.Choice(["auto", "graphs", "eager"]),
    default="auto",
    show_default=True,
    help="graphs captures the forwards (CUDA only); auto: graphs on CUDA.",
)
@click.option("--contexts", type=Numbers(), help="Cached tokens to measure at.")
@click.option("--max-nodes", type=click.IntRange(min=3), help="Largest draft tree.")
@click.option("--batch", "batches", type=Numbers(), default="1", show_default=True)
@click.option(
    "--time-budget",
    "time_budget_s",
    type=Duration(),
    help="Time to measure [default: 30s, on a CPU 45s].",
)
@click.option("--output", type=click.Path(path_type=Path), help="Write the profile here.")
@click.option("--fresh", is_flag=True, help="Drop what an unfinished run has measured.")
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Of the held-out points.",
)
@click.option("--fleet", is_flag=True, help="Measure each kind of GPU of a Ray cluster.")
@click.option(
    "--fleet-address", help="Address of the cluster's head, host:port [default: the running one]."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
def command(as_json: bool, fleet: bool, fleet_address: str | None, **settings: Any) -> None:
    """Measure what a verification step costs on this device and write a profile.

    Times the decoder's own functions over rows x contexts, fits the calibrations,
    checks them on points held out, and says how far to trust the result. An
    interrupted run loses nothing: the same command goes on where it stopped.

    With --fleet the measurements run on a Ray cluster, one for each distinct kind of
    GPU (of CPU with --device cpu, or where there is no GPU), and the profiles are
    gathered here. Needs `pip install 'rooftree[fleet]'` on every node.

    With `torchrun --no-python --nproc-per-node N rooftree calibrate` N GPUs share the
    target (tensor parallelism); the profile is of that degree and no other.
    """
    if fleet_address is not None and not fleet:
        raise click.UsageError("--fleet-address needs --fleet.")
    if fleet:
        from profiler.fleet_command import run_fleet

        run_fleet(settings, fleet_address or "auto", as_json=as_json)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    from decoder.launch import launched_rank
    from profiler.calibrate import CalibrationSettings, Listener, calibrate
    from profiler.parallel import EndedElsewhere

    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    columns = (TextColumn("measuring"), BarColumn(), TextColumn("{task.fields[state]}"))
    speaks = launched_rank() == 0
    hidden = not speaks or not console.is_terminal
    with Bar(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("measuring", total=1.0, state="loading the target")
        listener = Listener(
            say=console.print,
            progress=lambda progress: bar.update(
                task, completed=done_share(progress), state=state(progress)
            ),
        )
        try:
            result = calibrate(CalibrationSettings(**settings), listener)
        except EndedElsewhere as ended:
            raise click.exceptions.Exit(ended.exit_code) from ended
    if not speaks:
        return
    if as_json:
        from profiler.render import print_json

        print_json(to_record(result))
    else:
        _show(result)


def done_share(progress: Progress) -> float:
    """How far the sweep is: points that are done, or time spent if that is further."""
    return max(progress.points_done / progress.points, progress.spent_s / progress.budget_s)


def state(progress: Progress) -> str:
    left_s = max(progress.budget_s - progress.spent_s, 0.0)
    return f"{progress.points_done}/{progress.points} points, at most {left_s:.0f} s left"


def to_record(result: CalibrationResult) -> dict[str, Any]:
    """The stable JSON form of a calibration's result."""
    from profiler.report import verdict

    profile = result.profile
    return {
        "path": str(result.path),
        "picture": str(result.picture),
        "verdict": verdict(profile),
        "warnings": list(result.warnings),
        "resumed_samples": result.resumed_samples,
        "unmeasured": [task.key() for task in result.unmeasured],
        "skipped": [task.key() | {"reason": reason} for task, reason in result.skipped.items()],
        "profile": profile.as_dict(),
    }


def _show(result: CalibrationResult) -> None:
    from profiler.render import print_table
    from profiler.report import linear_line, profile_columns, profile_rows, verdict

    profile = result.profile
    made = profile.provenance
    print_table(profile_columns(profile), profile_rows(profile))
    click.echo(
        f"{made.points} points from {made.samples} samples in {made.duration_s:.0f} s"
        f" ({made.discarded_samples} discarded); selected calibration: "
        f"{profile.calibration.selected}"
    )
    click.echo(linear_line(profile))
    if result.skipped:
        click.echo(f"{len(result.skipped)} points did not fit into memory")
    if result.unmeasured:
        click.echo(f"{len(result.unmeasured)} points did not fit the time budget")
    click.echo(f"profile: {result.path}")
    click.echo(f"picture: {result.picture}")
    click.echo(verdict(profile))
