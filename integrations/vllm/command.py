"""`rooftree calibrate vllm`: vLLM's own steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from profiler.commands.calibrate import measure
from profiler.commands.options import (
    NamedValue,
    contexts_option,
    count_option,
    json_option,
    measuring_options,
    target_option,
)


@click.command(name="vllm", short_help="Measure vLLM's own steps in this process.")
@target_option
@click.option("--drafter", default="ngram", show_default=True,
              help="Drafter whose cost to add: none, ngram, mtp, demo, or a folder.")  # fmt: skip
@contexts_option
@count_option("--max-nodes", "Tokens of the longest draft [default: 15].")
@measuring_options("1,2,4,8", "60s")
@click.option("--engine-option", "engine_options", type=NamedValue(), multiple=True,
              metavar="NAME=VALUE", help="Argument of vLLM, such as tensor_parallel_size=2 or "
              "dtype=float16; may be repeated.")  # fmt: skip
@json_option
@click.pass_context
def command(
    ctx: click.Context, engine_options: tuple[tuple[str, Any], ...], as_json: bool, **options: Any
) -> None:
    """Measure the steps of vLLM itself, and the cost of its drafter.

    The engine's scheduler runs in this process. Needs vLLM (docs/engines.md).
    """
    from integrations.vllm.source import VllmSource

    measure(ctx, partial(VllmSource, options=dict(engine_options)), as_json, options)
