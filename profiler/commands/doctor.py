"""`rooftree doctor`: what was found, what is missing, what to do."""

from __future__ import annotations

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
def command(as_json: bool) -> None:
    """Look at this machine: versions, device, data directory, profile, demo model, busy processes.

    Nothing is changed; only the data directory is created where it can be.
    """
    from dataclasses import asdict

    from profiler.checks import next_step, run_checks
    from profiler.render import print_json, print_table

    checks = run_checks()
    if as_json:
        print_json({"checks": [asdict(check) for check in checks], "next": next_step(checks)})
        return
    print_table(
        ("what", "", "found", "what to do"),
        [(check.name, check.status, check.found, check.advice) for check in checks],
    )
    click.echo(f"Next: {next_step(checks)}")
