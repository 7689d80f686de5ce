"""`rooftree transfer`: a profile scaled to another device."""

from __future__ import annotations

from pathlib import Path

import click

from profiler.commands.compose import save_and_show
from profiler.commands.options import json_option


@click.command(name="transfer")
@click.argument("name", metavar="PROFILE")
@click.option("--to", "device_name", required=True, help="GPU by slug, name or alias.")
@click.option("--output", type=click.Path(path_type=Path), help="File or folder to write to.")
@json_option
def command(name: str, device_name: str, output: Path | None, as_json: bool) -> None:
    """Scale a profile to another GPU by both data sheets.

    PROFILE is a path, or DEVICE/TARGET such as h100-sxm/qwen3-8b.
    Memory-bound time scales by bandwidth, compute-bound time by FLOPs. The error
    bar is from a study of all GPU pairs at hand: within a chip it is smallest,
    across vendors largest.
    """
    from costmodel.catalog import find_device
    from costmodel.compose.transfer import transfer_profile
    from costmodel.compose.transfer_errors import transfer_errors
    from costmodel.profile.lookup import named_profile

    _, profile = named_profile(name)
    device = find_device(device_name)
    save_and_show(transfer_profile(profile, device), output, as_json)
    if not as_json:
        click.echo(f"transfer: {transfer_errors().text(profile.device.slug, device.slug)}")
