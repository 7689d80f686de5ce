"""`rooftree plan`: which GPUs, how many, what tree size, at what cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


@click.command(name="plan")
@click.option("--target", required=True, help="Known target or model folder.")
@click.option("--gpus", required=True, help="GPUs by slug, with commas; or paths of profiles.")
@click.option("--prompt-tokens", type=float, help="Mean tokens of a prompt.")
@click.option("--output-tokens", type=float, help="Mean tokens of an answer.")
@click.option("--rate", help="Requests, such as 5/s or 300/min [default: the trace's].")
@click.option("--trace", type=click.Path(path_type=Path), metavar="FILE.csv",
              help="Traffic as it was: arrival_s,prompt_tokens,output_tokens.")  # fmt: skip
@click.option(
    "--slo",
    default="",
    help="Goals: means such as tpot=30ms,ttft=1s, percentiles such as ttft.p95=2s.",
)
@click.option(
    "--simulate",
    is_flag=False,
    flag_value=-1,
    type=int,
    metavar="[REQUESTS]",
    help="Percentiles by simulation [default: 2000 requests, or the whole trace].",
)
@click.option("--seed", type=int, help="Of the simulation [default: 0].")
@click.option("--length-variation", type=float,
              help="Standard deviation of lengths over their mean [default: 0.7].")  # fmt: skip
@click.option("--acceptance", help="A bench result, a published data set or a rate such as 0.8.")
@click.option("--temperature", type=click.Choice(["0", "1"]), default="0", show_default=True,
              help="Of published acceptance.")  # fmt: skip
@click.option("--price", "prices", multiple=True, help="Per GPU and hour, such as h100-sxm=2.5.")
@click.option("--tp", default="1", show_default=True, help="Tensor-parallel degrees, with commas.")
@click.option("--policy", default="auto", show_default=True, help="auto, plain, chain or fixed:N.")
@click.option("--engine", default="vllm", show_default=True,
              type=click.Choice(["vllm", "sglang", "trtllm", "rooftree"]),
              help="Whose scheduling and overheads.")  # fmt: skip
@click.option("--drafter", help="dflash, ngram, or one that the profile has timed.")
@click.option("--weights", default="bfloat16", show_default=True,
              help="bfloat16, fp8, fp8_dynamic, fp8_block or nvfp4.")  # fmt: skip
@click.option("--cache", default="bfloat16", show_default=True, help="bfloat16 or fp8.")
@click.option("--utilisation", default=0.8, show_default=True, help="Load of a server, 0 to 1.")
@click.option("--max-running", default=256, show_default=True, help="Requests at once, at most.")
@click.option("--format", "form", default="table", show_default=True,
              type=click.Choice(["table", "json", "csv", "html"]))  # fmt: skip
@click.option("--export", "engine_settings", type=click.Choice(["vllm", "sglang", "transformers"]),
              help="Print an engine's speculative settings instead.")  # fmt: skip
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path),
              help="A PNG: cost against goal, and best tree size.")  # fmt: skip
def command(form: str, engine_settings: str | None, plot: Path | None, **options: Any) -> None:
    """Plan capacity for a target and its traffic.

    Times come from profiles (yours, else those shipped), or from published operator
    measurements (`pip install 'rooftree[operators]'`), which more than one GPU or other
    precisions need. Exit code 2 where no option holds the goals; the nearest is named.
    """
    from profiler.plan_options import PlanOptions, make_plan
    from profiler.planning import export_settings, print_plan, refuse_infeasible

    plan = make_plan(PlanOptions(**options))
    if plot is not None:
        from profiler.plan_plots import plot_plan
        from profiler.render import note

        note(f"picture: {plot_plan(plan, plot)}")
    if engine_settings is not None:
        click.echo(export_settings(plan, engine_settings), nl=False)
    else:
        print_plan(plan, form)
        refuse_infeasible(plan)
