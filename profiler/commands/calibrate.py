"""`rooftree calibrate`: measure this device and write its profile."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from profiler.commands.options import (
    Duration,
    NamedValue,
    Numbers,
    execution_options,
    json_option,
    seed_option,
    target_option,
)

if TYPE_CHECKING:
    from profiler.calibrate.calibrate import (
        CalibrationListener,
        CalibrationResult,
        CalibrationSettings,
    )


@click.command(name="calibrate")
@target_option
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
@execution_options
@click.option("--contexts", type=Numbers(), help="Cached tokens to measure at.")
@click.option("--max-nodes", type=click.IntRange(min=3), help="Nodes of the largest draft tree.")
@click.option(
    "--batch",
    "batches",
    type=Numbers(),
    help="Batch sizes [default: 1; with --engine or --url 1,2,4,8].",
)
@click.option(
    "--time-budget",
    "time_budget_s",
    type=Duration(),
    help="Time to measure [default: 30s, on a CPU 45s, with --engine 60s, with --url 90s].",
)
@click.option(
    "--time-limit",
    "time_limit_s",
    type=Duration(),
    help="Most time, where a choice of tree size may still cost over 3% when the budget is spent "
    "[default: 2m, on a CPU 3m; with --time-budget that alone].",
)
@click.option("--output", type=click.Path(path_type=Path), help="Write the profile to this file.")
@click.option("--fresh", is_flag=True, help="Drop the samples of an interrupted run.")
@seed_option(help="Seed of the held-out points.")
@click.option(
    "--engine", type=click.Choice(["vllm"]), help="Measure the steps of this engine instead."
)
@click.option(
    "--engine-option",
    "engine_options",
    type=NamedValue(),
    multiple=True,
    metavar="NAME=VALUE",
    help="Argument of the engine, as enforce_eager=true; may be repeated.",
)
@click.option("--url", help="Measure the OpenAI-compatible server at http://HOST:PORT instead.")
@click.option("--model", help="With --url: the model's name at the server [default: its only one].")
@click.option(
    "--api-key", metavar="VARIABLE", help="With --url: environment variable that holds the key."
)
@click.option(
    "--tp",
    "tensor_parallel",
    type=click.IntRange(min=1),
    help="With --url: devices that share the target there [default: 1].",
)
@click.option("--fleet", is_flag=True, help="Measure each kind of GPU of a Ray cluster.")
@click.option(
    "--fleet-address", help="Address of the cluster's head, host:port [default: the running one]."
)
@json_option
def command(
    as_json: bool, fleet: bool, fleet_address: str | None, engine: str | None, **settings: Any
) -> None:
    """Measure what a verification step costs on this device and write a profile.

    Times the decoder's own functions over rows x contexts, fits the calibrations,
    checks them on held-out points, and says how far to trust the result. An
    interrupted run loses nothing: the same command resumes it.

    With --fleet the measurements run on a Ray cluster, one for each distinct kind of
    GPU (of CPU with --device cpu, or where there is no GPU), and the profiles are
    stored here. Needs `pip install 'rooftree[fleet]'` on every node.

    With --engine vllm the steps of vLLM itself are measured, in this process, and the
    cost of its drafter: none, ngram, mtp, demo, or a folder. Needs vLLM (docs/engines.md).

    With --url a server is measured from outside, by its answers' times: vLLM, SGLang,
    llama.cpp or another with a prefix cache and without other work. --device names its
    device where that is not this machine's, as h100-sxm (docs/engines.md).
    """
    settings["engine_options"] = dict(settings["engine_options"])
    server = {name: settings.pop(name) for name in ("url", "model", "api_key", "tensor_parallel")}
    _check_server(server, engine, fleet, settings)
    _check_engine(engine, fleet, settings)
    if fleet_address is not None and not fleet:
        raise click.UsageError("--fleet-address needs --fleet.")
    if fleet:
        from profiler.calibrate.fleet.command import run_fleet

        run_fleet(settings, fleet_address or "auto", as_json=as_json)
        return
    result = _run(settings, engine, server)
    if as_json:
        from profiler.report.console import print_json

        print_json(to_record(result))
    else:
        _show(result)


def _check_server(
    server: dict[str, Any], engine: str | None, fleet: bool, settings: dict[str, Any]
) -> None:
    """Refuse options that do not go together with a server, or without one."""
    if server["url"] is None:
        given = [name for name, value in server.items() if value is not None]
        if given:
            option = {"tensor_parallel": "tp"}.get(given[0], given[0]).replace("_", "-")
            raise click.UsageError(f"--{option} needs --url.")
        return
    if engine is not None or fleet:
        raise click.UsageError("--url excludes --engine and --fleet.")
    own = {"runtime": "auto", "weights": "auto", "drafter": "ngram", "quantization": None}
    for name, usual in own.items():
        if settings[name] != usual:
            raise click.UsageError(f"--{name} cannot be set for a server (--url).")


def _check_engine(engine: str | None, fleet: bool, settings: dict[str, Any]) -> None:
    """Refuse options that do not go together."""
    if engine is None:
        if settings["engine_options"]:
            raise click.UsageError("--engine-option needs --engine.")
        return
    if fleet:
        raise click.UsageError("--engine and --fleet exclude each other.")
    if settings["runtime"] != "auto" or settings["weights"] != "auto":
        raise click.UsageError(
            "--runtime and --weights are the decoder's own; for the engine's see --engine-option."
        )


def _run(settings: dict[str, Any], engine: str | None, server: dict[str, Any]) -> CalibrationResult:
    """Calibrate with a progress bar."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    from profiler.calibrate.calibrate import CalibrationListener, CalibrationSettings, calibrate

    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    columns = (TextColumn("measuring"), BarColumn(), TextColumn("{task.fields[state]}"))
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("measuring", total=1.0, state="loading the target")
        listener = CalibrationListener(
            say=console.print,
            progress=lambda progress: bar.update(
                task, completed=progress.share, state=progress.text
            ),
        )
        if server["url"] is not None:
            return _at_server(CalibrationSettings(**settings), server, listener)
        if engine is None:
            return calibrate(CalibrationSettings(**settings), listener)
        return _in_engine(CalibrationSettings(**settings), listener)


def _in_engine(settings: CalibrationSettings, listener: CalibrationListener) -> CalibrationResult:
    """Calibrate vLLM; what it prints on stdout, which belongs to the result, goes to stderr."""
    from profiler.calibrate.engines.calibration import calibrate_engine

    with contextlib.redirect_stdout(sys.stderr):
        return calibrate_engine(settings, listener)


def _at_server(
    settings: CalibrationSettings, server: dict[str, Any], listener: CalibrationListener
) -> CalibrationResult:
    from profiler.calibrate.served.calibration import ServerSettings, calibrate_server

    given = {name: value for name, value in server.items() if value is not None}
    return calibrate_server(settings, ServerSettings(**given), listener)


def to_record(result: CalibrationResult) -> dict[str, Any]:
    """The stable JSON form of a calibration's result."""
    from profiler.report.profiles import verdict

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
    from profiler.report.console import print_table
    from profiler.report.profiles import linear_line, profile_columns, profile_rows, verdict

    profile = result.profile
    provenance = profile.provenance
    print_table(profile_columns(profile), profile_rows(profile))
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
