"""`rooftree plan`: GPUs, tree sizes and cost; `rooftree export`: an engine's settings alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from profiler.commands.options import EXPORTS, PicturePath, json_option


@click.command(name="plan")
@click.option(
    "--target",
    required=True,
    help="Name of a target, a model folder, its config.json, or a hub id.",
)
@click.option(
    "--gpus", required=True, help="Slugs of GPUs or paths of profiles, separated by commas."
)
@click.option("--prompt-tokens", type=float, help="Mean tokens of a prompt.")
@click.option("--output-tokens", type=float, help="Mean tokens of an answer.")
@click.option("--rate", help="Request rate, such as 5/s or 300/min [default: the trace's].")
@click.option("--trace", type=click.Path(path_type=Path), metavar="FILE.csv",
              help="Recorded traffic: arrival_s,prompt_tokens,output_tokens.")  # fmt: skip
@click.option(
    "--slo",
    default="",
    help="Latency goals: means such as tpot=30ms,ttft=1s; percentiles such as ttft.p95=2s.",
)
@click.option(
    "--simulate",
    is_flag=False,
    flag_value=-1,
    type=int,
    metavar="[REQUESTS]",
    help="Simulate, for percentiles [default: 2000 requests, or the whole trace].",
)
@click.option("--seed", type=int, help="Seed of the simulation [default: 0].")
@click.option("--length-variation", type=float,
              help="Standard deviation of lengths over their mean [default: 0.7].")  # fmt: skip
@click.option(
    "--acceptance", help="Acceptance: a bench result, a published data set, or a rate such as 0.8."
)
@click.option("--temperature", type=click.Choice(["0", "1"]), default="0", show_default=True,
              help="Temperature of published acceptance.")  # fmt: skip
@click.option(
    "--price", "prices", multiple=True, help="Price per GPU and hour, such as h100-sxm=2.5."
)
@click.option("--currency", default="USD", show_default=True, help="Currency of the prices.")
@click.option(
    "--tp", default="1", show_default=True, help="Tensor-parallel degrees, separated by commas."
)
@click.option("--policy", default="auto", show_default=True,
              help="Draft trees: auto, plain, chain, chain:N or fixed:N.")  # fmt: skip
@click.option("--engine", type=click.Choice(["vllm", "sglang", "trtllm", "rooftree"]),
              help="Serving engine; only rooftree verifies trees [default: --export's, else vllm]."
              )  # fmt: skip
@click.option("--drafter", help="Drafter: dflash, ngram, or one timed in the profile "
              "[default: the acceptance's].")  # fmt: skip
@click.option("--weights", default="bfloat16", show_default=True,
              help="Weights: bfloat16, fp8, fp8_dynamic, fp8_block or nvfp4.")  # fmt: skip
@click.option("--cache", default="bfloat16", show_default=True, help="KV cache: bfloat16 or fp8.")
@click.option(
    "--utilisation",
    default=0.8,
    show_default=True,
    help="Load of a server as a share of its throughput.",
)
@click.option(
    "--max-running", default=256, show_default=True, help="Most requests at once on a server."
)
@click.option("--csv", "as_csv", is_flag=True, help="Print one line of CSV for each option.")
@click.option("--export", type=click.Choice(EXPORTS),
              help="Print an engine's speculative settings instead.")  # fmt: skip
@click.option("--why", is_flag=False, flag_value=0, type=int, metavar="[AT_ONCE]",
              help="Explain the rows, or those of so many requests at once, by cause.")  # fmt: skip
@click.option("--plot", type=PicturePath(), metavar="FILE.png|svg|pdf",
              help="Draw cost against goal, and the best draft for each GPU.")  # fmt: skip
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path),
              help="Write tables and pictures as one HTML page.")  # fmt: skip
@json_option
def command(
    as_csv: bool,
    export: str | None,
    why: int | None,
    plot: Path | None,
    html: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Plan capacity for a target and its traffic.

    Times come from profiles: yours first, then the shipped ones. Where there is none, one
    is composed from published operator measurements, which
    `pip install 'rooftree[operators]'` adds. If no option holds the goals, the nearest
    is named and the exit code is 2.
    """
    from costmodel.planning.exports import PLANNED_FOR, export_plan
    from costmodel.planning.request import PlanOptions, request_from_options
    from costmodel.planning.search import plan
    from profiler.report import plan_tables
    from profiler.report.console import note, print_json
    from profiler.report.plan_page import write_plan_page
    from profiler.report.plan_pictures import plot_plan
    from profiler.report.plan_reasons import print_pays, print_why
    from profiler.report.plan_tables import print_settings

    if as_csv and as_json:
        raise click.UsageError("--csv and --json are two forms of the same; give one.")
    engine = options.pop("engine") or PLANNED_FOR.get(export or "", "vllm")
    result = plan(request_from_options(PlanOptions(engine=engine, **options)))
    if plot is not None:
        note(f"picture: {plot_plan(result, plot)}")
    if html is not None:
        note(f"page: {write_plan_page(result, html)}")
    if export is not None:
        print_settings(result, export, export_plan(result, export), as_json)
        return
    if as_json:
        print_json(result.as_dict())
    elif as_csv:
        click.echo(plan_tables.as_csv(result), nl=False)
    else:
        print_pays(result)
        plan_tables.print_tables(result)
        if why is not None:
            print_why(result, why)
    plan_tables.refuse_infeasible(result)


@click.command(name="export")
@click.argument("name", metavar="PROFILE")
@click.option("--engine", type=click.Choice(EXPORTS), required=True,
              help="Engine, and for SGLang's DSpark the form of its table.")  # fmt: skip
@click.option(
    "--acceptance", help="Acceptance: a bench result, a published data set, or a rate such as 0.8."
)
@click.option("--temperature", type=click.Choice(["0", "1"]), default="0", show_default=True,
              help="Temperature of published acceptance.")  # fmt: skip
@click.option("--drafter", help="Drafter: dflash, ngram, or one timed in the profile "
              "[default: the acceptance's].")  # fmt: skip
@click.option("--prompt-tokens", default=1000.0, show_default=True,
              help="Mean tokens of a prompt.")  # fmt: skip
@click.option("--output-tokens", default=500.0, show_default=True,
              help="Mean tokens of an answer.")  # fmt: skip
@click.option("--running", default=8, show_default=True, type=click.IntRange(min=1),
              help="Requests at once, for engines with one size for all.")  # fmt: skip
@click.option("--max-running", default=256, show_default=True, type=click.IntRange(min=1),
              help="Most requests at once on a server.")  # fmt: skip
@json_option
def export(name: str, engine: str, running: int, as_json: bool, **options: Any) -> None:
    """Write an engine's speculative settings from a profile.

    PROFILE is a path, or DEVICE/TARGET such as h100-sxm/qwen3-8b. The drafted tokens for each
    number of requests at once are those of the highest throughput at the given lengths; the text
    is that of `rooftree plan --export`.
    """
    from costmodel.planning.exports import PLANNED_FOR, export_plan
    from costmodel.planning.forwards import TargetForward
    from costmodel.planning.request import PlanRequest
    from costmodel.planning.search import plan_profile
    from costmodel.planning.traffic import Traffic
    from costmodel.profile.lookup import named_profile
    from profiler.report.plan_tables import print_settings

    path, profile = named_profile(name)
    request = PlanRequest(
        target=profile.target.name,
        gpus=(f"{profile.device.slug} ({path.name})",),
        traffic=Traffic(
            prompt_tokens=options["prompt_tokens"], output_tokens=options["output_tokens"]
        ),
        rate=1.0,
        acceptance=options["acceptance"],
        temperature=int(options["temperature"]),
        engine=PLANNED_FOR[engine],
        drafter=options["drafter"],
        most_running=options["max_running"],
    )
    result = plan_profile(request, profile, running)
    text = export_plan(result, engine, TargetForward(profile, request.engine))
    print_settings(result, engine, text, as_json)
