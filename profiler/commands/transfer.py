"""`rooftree transfer`: a profile scaled to a sibling device."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(name="transfer")
@click.argument("name", metavar="PROFILE")
@click.option("--to", "device_name", required=True, help="GPU by slug or name.")
@click.option("--output", type=click.Path(path_type=Path), help="File or folder to write to.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
def command(name: str, device_name: str, output: Path | None, as_json: bool) -> None:
    """Scale a profile to a sibling GPU by both data sheets.

    PROFILE is a path, or a part of a path that `rooftree profiles list` prints.
    Memory-bound time scales by bandwidth, compute-bound time by FLOPs.
    """
    from costmodel.compose.transfer import transfer_profile
    from costmodel.device import find_device
    from profiler.commands.compose import show
    from profiler.composing import store
    from profiler.profile_views import find_profile

    _, profile = find_profile(name)
    moved = transfer_profile(profile, find_device(device_name))
    show(moved, store(moved, output), as_json)
