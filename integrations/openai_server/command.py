"""`rooftree calibrate url`: a server by its answers' times."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from profiler.commands.calibrate import measure
from profiler.commands.options import contexts_option, count_option, json_option, measuring_options


@click.command(name="url", short_help="Measure an OpenAI-compatible server from outside.")
@click.argument("url", metavar="http://HOST:PORT")
@click.option("--target", help="Folder or hub id, and the model at a server of several [default: "
              "its only one].")  # fmt: skip
@click.option("--device", help="The server's device: a known GPU, such as h100-sxm "
              "[default: this machine's].")  # fmt: skip
@count_option("--tensor-parallel-size", "GPUs that share the target there.", default=1)
@contexts_option
@measuring_options("1,2,4,8", "90s")
@json_option
@click.pass_context
def command(
    ctx: click.Context, url: str, tensor_parallel_size: int, as_json: bool, **options: Any
) -> None:
    """Measure a server by its answers' times: vLLM, SGLang, llama.cpp or another one.

    The server needs a prefix cache and must have no other work. If it wants an API
    key, put that into the environment variable ROOFTREE_API_KEY.
    """
    from integrations.openai_server.source import UrlSource

    source = partial(UrlSource, url=url, tensor_parallel=tensor_parallel_size)
    measure(ctx, source, as_json, options)
