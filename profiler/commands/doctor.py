"""`rooftree doctor`: check this machine and name the next step."""

from __future__ import annotations

import click

from profiler.commands.options import json_option


@click.command()
@json_option
def command(as_json: bool) -> None:
    """Check versions, device, data directory, profile, demo model and busy processes.

    Nothing is changed, except that a missing data directory is created.
    """
    from dataclasses import asdict

    from profiler.checks import next_step, run_checks
    from profiler.report.console import print_json, print_table

    checks = run_checks()
    if as_json:
        print_json({"checks": [asdict(check) for check in checks], "next": next_step(checks)})
        return
    print_table(
        ("what", "status", "found", "what to do"),
        [(check.name, check.status, check.found, check.advice) for check in checks],
        keys=2,
        prose=("found", "what to do"),
    )
    click.echo(f"Next: {next_step(checks)}")
