"""`rooftree calibrate`: measure this decoder, vLLM, a server or a cluster, and write profiles."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from profiler.commands.options import (
    NamedValue,
    batch_option,
    budget_option,
    contexts_option,
    count_option,
    execution_options,
    json_option,
    profile_output_option,
    target_option,
)

if TYPE_CHECKING:
    from costmodel.profile.profile import Profile
    from profiler.calibrate.fleet.scheduler import (
        FleetDevice,
        FleetListener,
        FleetOutcome,
        JobState,
    )
    from profiler.calibrate.run import CalibrationListener, CalibrationResult


class Sources(click.Group):
    """The sources of a calibration, before or behind which `--replace` may stand."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--replace" in args:
            args = ["--replace", *(word for word in args if word != "--replace")]
        return super().parse_args(ctx, args)


@click.group(
    name="calibrate", cls=Sources, invoke_without_command=True, subcommand_metavar="[COMMAND]"
)
@target_option
@click.option("--drafter", default="ngram", show_default=True, help="Drafter whose cost to add, as "
              "in generate: ngram, demo, a folder or hub id, A@block=N, or A+B.")  # fmt: skip
@execution_options
@contexts_option
@count_option("--max-nodes", "Nodes of the largest draft tree.", least=3)
@batch_option("1")
@budget_option("45s, on a CPU 65s")
@profile_output_option
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
    with listening() as listener:
        from profiler.calibrate.run import calibrate
        from profiler.calibrate.source import CalibrationSettings

        result = calibrate(CalibrationSettings(**options), listener)
    ctx.exit(print_result(result, as_json))


@command.command(name="vllm", short_help="Measure vLLM's own steps in this process.")
@target_option
@click.option("--drafter", default="ngram", show_default=True,
              help="Drafter whose cost to add: none, ngram, mtp, demo, or a folder.")  # fmt: skip
@contexts_option
@count_option("--max-nodes", "Tokens of the longest draft [default: 15].")
@batch_option("1,2,4,8")
@budget_option("60s")
@profile_output_option
@click.option("--engine-option", "engine_options", type=NamedValue(), multiple=True,
              metavar="NAME=VALUE", help="Argument of vLLM, such as tensor_parallel_size=2 or "
              "dtype=float16; may be repeated.")  # fmt: skip
@json_option
@click.pass_context
def vllm_command(
    ctx: click.Context, engine_options: tuple[tuple[str, Any], ...], as_json: bool, **options: Any
) -> None:
    """Measure the steps of vLLM itself, and the cost of its drafter.

    The engine's scheduler runs in this process. Needs vLLM (docs/engines.md).
    """
    from profiler.calibrate.run import calibrate
    from profiler.calibrate.source import CalibrationSettings
    from profiler.calibrate.sources.vllm import VllmSource

    settings = CalibrationSettings(**options, replace=replaces(ctx))
    # What vLLM prints on stdout, which belongs to the result, goes to stderr.
    with contextlib.redirect_stdout(sys.stderr), listening() as listener:
        source = VllmSource(settings, options=dict(engine_options))
        result = calibrate(settings, listener, source)
    ctx.exit(print_result(result, as_json))


@command.command(name="url", short_help="Measure an OpenAI-compatible server from outside.")
@click.argument("url", metavar="http://HOST:PORT")
@click.option("--target", help="Folder or hub id, and the model at a server of several [default: "
              "its only one].")  # fmt: skip
@click.option("--device", help="The server's device: a known GPU, such as h100-sxm "
              "[default: this machine's].")  # fmt: skip
@count_option("--tensor-parallel-size", "GPUs that share the target there.", default=1)
@contexts_option
@batch_option("1,2,4,8")
@budget_option("90s")
@profile_output_option
@json_option
@click.pass_context
def url_command(
    ctx: click.Context, url: str, tensor_parallel_size: int, as_json: bool, **options: Any
) -> None:
    """Measure a server by its answers' times: vLLM, SGLang, llama.cpp or another one.

    The server needs a prefix cache and must have no other work. If it wants an API
    key, put that into the environment variable ROOFTREE_API_KEY.
    """
    from profiler.calibrate.run import calibrate
    from profiler.calibrate.source import CalibrationSettings
    from profiler.calibrate.sources.url import UrlSource

    settings = CalibrationSettings(**options, replace=replaces(ctx))
    source = UrlSource(settings, url, tensor_parallel=tensor_parallel_size)
    with listening() as listener:
        result = calibrate(settings, listener, source)
    ctx.exit(print_result(result, as_json))


@command.command(name="fleet", short_help="Measure each kind of GPU of a Ray cluster.")
@click.argument("address", default="auto", metavar="[HOST:PORT]")
@target_option
@click.option("--device", type=click.Choice(["cpu", "cuda"]),
              help="Kind of device [default: CUDA where there is one].")  # fmt: skip
@json_option
@click.pass_context
def fleet_command(ctx: click.Context, address: str, as_json: bool, **options: Any) -> None:
    """Measure each distinct kind of GPU of a Ray cluster, and store the profiles here.

    HOST:PORT is the cluster's head; the default is the one that runs. Needs
    `pip install 'rooftree[fleet]'` on every node. The profiles of other kinds are
    stored where one kind fails, and the exit code tells it.
    """
    from costmodel.errors import MeasurementError
    from profiler.calibrate.files import check_writable
    from profiler.calibrate.fleet.ray_cluster import ray_cluster
    from profiler.calibrate.fleet.scheduler import calibrate_fleet
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
            click.echo(f"  profile: {record['path']}")
            click.echo(f"  picture: {record['picture']}")
            if record["aside"]:
                click.echo(f"  {aside_line(record['aside'])}")
            click.echo(f"  {record['verdict']}")
            click.echo(f"  {record['grade']}: {record['next']}")
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

    from profiler.calibrate.fleet.scheduler import FleetListener, label

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
    from profiler.calibrate.files import store
    from profiler.calibrate.fleet.scheduler import label

    record: dict[str, Any] = {"kind": label(outcome.fingerprint), "attempts": outcome.attempts}
    if outcome.device is not None:
        record |= {"host": outcome.device.host, "device": outcome.device.device}
    if outcome.gathered is None:
        return record | {"problem": outcome.problem}
    profile, found = outcome.gathered.profile, {"warnings": list(outcome.gathered.warnings)}
    return record | stored_record(profile, *store(profile, replace=replace)) | found


def replaces(ctx: click.Context) -> bool:
    """Whether `--replace` was given to `calibrate`, of which the command is a source."""
    return ctx.parent is not None and bool(ctx.parent.params["replace"])


@contextlib.contextmanager
def listening() -> Iterator[CalibrationListener]:
    """Messages and progress on stderr, from before torch is imported."""
    from profiler.report.console import progress

    with progress("measuring") as shown:
        from profiler.calibrate.run import CalibrationListener

        yield CalibrationListener(
            say=shown.say, progress=lambda state: shown.update(state.share, state.text)
        )


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
    from profiler.report.console import print_json, print_table
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
    click.echo(f"profile: {result.path}")
    click.echo(f"picture: {result.picture}")
    if result.aside:
        click.echo(aside_line(result.aside))
    click.echo(record["verdict"])
    click.echo(f"{record['grade']}: {record['next']}")
    return exit_code


def aside_line(reason: str) -> str:
    """The sentence that tells that a profile was put aside."""
    return (
        f"It did not replace the stored profile, which stays in use: {reason}. "
        "The same command with `--replace` replaces it."
    )
