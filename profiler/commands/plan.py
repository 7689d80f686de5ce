"""`rooftree plan`: GPUs, tree sizes and cost; `rooftree export`: an engine's settings alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from costmodel.plugins import SETTINGS, plugin_names
from profiler.commands.options import PicturePath, acceptance_option, json_option
from profiler.report.console import note, print_json

EXPORTS = plugin_names(SETTINGS)
NAMES = ", ".join(EXPORTS)
AT_ONCE = 8  # requests, for engines with one draft size for all
drafter_option = click.option(
    "--drafter", help="Drafter: dflash, dspark, eagle3, mtp, ngram, or one timed in the profile "
    "[default: the acceptance's].",
)  # fmt: skip


@click.command(name="plan")
@click.option("--target", required=True,
              help="Name of a target, a model folder, its config.json, or a hub id.")  # fmt: skip
@click.option("--gpus", required=True, help="Slugs of GPUs or paths of profiles, separated by "
              "commas; all: every known GPU.")  # fmt: skip
@click.option("--prompt-tokens", type=float, help="Mean tokens of a prompt.")
@click.option("--output-tokens", type=float, help="Mean tokens of an answer.")
@click.option("--rate", help="Request rate, such as 5/s or 300/min [default: the trace's].")
@click.option("--trace", type=click.Path(path_type=Path), metavar="FILE.csv",
              help="Recorded traffic: arrival_s,prompt_tokens,output_tokens.")  # fmt: skip
@click.option("--slo", default="", help="Latency goals: means such as tpot=30ms,ttft=1s; "
              "percentiles such as ttft.p95=2s.")  # fmt: skip
@click.option("--simulate", is_flag=False, flag_value=-1, type=int, metavar="[REQUESTS]",
              help="Simulate, for percentiles [default: 2000 requests, or the whole "
              "trace].")  # fmt: skip
@acceptance_option
@click.option(
    "--price", "prices", multiple=True, help="Price per GPU and hour, such as h100-sxm=2.5."
)
@click.option("--tp", default="1", show_default=True,
              help="Tensor-parallel degrees, separated by commas; behind them vLLM's "
              "--data-parallel-size N and --enable-expert-parallel.")  # fmt: skip
@click.option("--policy", default="auto", show_default=True,
              help="Draft trees: auto, plain, chain, chain:N or fixed:N.")  # fmt: skip
@click.option("--engine", help="Serving engine: vllm, sglang, trtllm, or rooftree, which alone "
              "verifies trees; also vllm@0.19,step-tokens=2048,prefix-hits=0.3: most tokens of a "
              "step, share of prompt tokens in the cache [default: --export's, else "
              "vllm].")  # fmt: skip
@drafter_option
@click.option("--weights",
              help="Weights: bfloat16, fp8, fp8_dynamic, fp8_block, nvfp4, mxfp4, or a "
              "checkpoint's label in a profile [default: the target's].")  # fmt: skip
@click.option("--cache", default="bfloat16", show_default=True, help="KV cache: bfloat16 or fp8.")
@click.option("--servers", default="80%", show_default=True, help="Number of servers; or as many "
              "as the rate loads to so much of their throughput.")  # fmt: skip
@click.option(
    "--max-running", default=256, show_default=True, help="Most requests at once on a server."
)
@click.option("--export", type=click.Choice(EXPORTS), metavar="ENGINE",
              help=f"Print an engine's speculative settings instead: {NAMES}.")  # fmt: skip
@click.option("--plot", type=PicturePath(), metavar="FILE.png|svg|pdf",
              help="Draw cost against time per token, one curve a GPU.")  # fmt: skip
@click.option("--details", is_flag=True, help="Print intervals, energy, and every number at once.")
@json_option
def command(
    export: str | None, plot: Path | None, details: bool, as_json: bool, **options: Any
) -> None:
    """Plan capacity for a target and its traffic.

    Times come from profiles: yours first, then the shipped ones. Where there is none, one
    is composed from published operator measurements, which
    `pip install 'rooftree[operators]'` adds. If no option holds the goals, the nearest
    is named and the exit code is 2.
    """
    from costmodel.planning.exports import export_plan, settings_writer
    from costmodel.planning.request import request_from_options
    from costmodel.planning.search import plan
    from profiler.report.plan import plot_plan, print_plan, print_settings, refuse_infeasible

    acceptance, temperature = part_temperature(options.pop("acceptance"))
    planned = export and settings_writer(export).engine
    engine = options.pop("engine") or planned or "vllm"
    given = {"engine": engine, "acceptance": acceptance, "temperature": temperature}
    result = plan(request_from_options(options | given))
    if export is not None:
        print_settings(result, export, export_plan(result, export), as_json)
    elif as_json:
        print_json(result.as_dict())
    else:
        print_plan(result, details=details)
    if plot is not None:
        note(f"picture: {plot_plan(result, plot)}")
    if export is None:
        refuse_infeasible(result)


def part_temperature(acceptance: str | None) -> tuple[str | None, int]:
    """A data set and its temperature from DATASET@1; at temperature 0 without it."""
    if acceptance is not None and acceptance.endswith(("@0", "@1")):
        return acceptance[:-2], int(acceptance[-1])
    return acceptance, 0


@click.command(name="export")
@click.argument("name", metavar="PROFILE")
@click.option("--engine", type=click.Choice(EXPORTS), required=True, metavar="ENGINE",
              help=f"Engine, and for SGLang's DSpark the form of its table: {NAMES}.")  # fmt: skip
@acceptance_option
@drafter_option
@json_option
def export(
    name: str, engine: str, acceptance: str | None, drafter: str | None, as_json: bool
) -> None:
    """Write an engine's speculative settings from a profile.

    PROFILE is a path, or DEVICE/TARGET such as h100-sxm/qwen3-8b. The drafted tokens fall
    with the requests at once, in the fewest steps inside the acceptance's error, for prompts of
    1000 tokens and answers of 500; `rooftree plan --export` writes the same text for other traffic.
    """
    from costmodel.planning.exports import export_plan, settings_writer
    from costmodel.planning.forwards import TargetForward
    from costmodel.planning.request import PlanRequest
    from costmodel.planning.search import plan_profile
    from costmodel.planning.traffic import Traffic
    from costmodel.profile.lookup import named_profile
    from profiler.report.plan import print_settings

    acceptance, temperature = part_temperature(acceptance)
    path, profile = named_profile(name)
    request = PlanRequest(
        target=profile.target.name,
        gpus=(f"{profile.device.slug} ({path.name})",),
        traffic=Traffic(prompt_tokens=1000.0, output_tokens=500.0),
        rate=1.0,
        acceptance=acceptance,
        temperature=temperature,
        engine=settings_writer(engine).engine or "vllm",
        drafter=drafter,
    )
    result = plan_profile(request, profile, AT_ONCE)
    text = export_plan(result, engine, TargetForward(profile, request.engine))
    print_settings(result, engine, text, as_json)
