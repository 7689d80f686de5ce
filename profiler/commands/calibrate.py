"""`rooftree calibrate`: measure this decoder on this device and write its profile."""

from __future__ import annotations

from typing import Any

import click
from click.core import ParameterSource

from profiler.commands import calibrate_fleet, calibrate_url, calibrate_vllm
from profiler.commands.calibrate_output import listening, print_result
from profiler.commands.options import (
    batch_option,
    budget_option,
    contexts_option,
    count_option,
    execution_options,
    json_option,
    profile_output_option,
    target_option,
)


@click.group(name="calibrate", invoke_without_command=True, subcommand_metavar="[COMMAND]")
@target_option
@click.option(
    "--drafter",
    default="ngram",
    show_default=True,
    help="Drafter whose cost to add, as in generate: ngram, demo, a folder or hub id, A@block=N, "
    "or A+B.",
)
@execution_options
@contexts_option
@count_option("--max-nodes", "Nodes of the largest draft tree.", least=3)
@batch_option("1")
@budget_option("30s, on a CPU 40s")
@profile_output_option
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
            if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                raise click.UsageError(f"Give options after '{ctx.invoked_subcommand}'.")
        return
    from profiler.calibrate.run import calibrate
    from profiler.calibrate.source import CalibrationSettings

    with listening() as listener:
        result = calibrate(CalibrationSettings(**options), listener)
    print_result(result, as_json)


command.add_command(calibrate_vllm.command)
command.add_command(calibrate_url.command)
command.add_command(calibrate_fleet.command)
