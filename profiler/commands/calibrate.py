"""`rooftree calibrate`: measure this decoder, vLLM or a server, and write its profile."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import click
from click.core import ParameterSource

from profiler.commands import calibrate_fleet
from profiler.commands.calibrate_output import listening, print_result, replaces
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


command.add_command(calibrate_fleet.command)
