"""`rooftree export`: an engine's speculative settings from one profile."""

from __future__ import annotations

from typing import Any

import click

from profiler.commands.options import EXPORTS, json_option


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
def command(name: str, engine: str, running: int, as_json: bool, **options: Any) -> None:
    """Write an engine's speculative settings from a profile.

    PROFILE is a path, or DEVICE/TARGET such as h100-sxm/qwen3-8b. The drafted tokens for each
    number of requests at once are those of the highest throughput at the given lengths; the text
    is that of `rooftree plan --export`.
    """
    from costmodel.planning.exports import PLANNED_FOR, export_plan
    from costmodel.planning.forwards import ProfileForward
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
    text = export_plan(result, engine, ProfileForward(profile=profile))
    print_settings(result, engine, text, as_json)
