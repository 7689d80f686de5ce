"""`rooftree compose`: a profile of a GPU that is not at hand, from operator tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from profiler.commands.options import json_option

if TYPE_CHECKING:
    from costmodel.profile.profile import Profile


@click.command(name="compose")
@click.option("--device", "device_name", help="GPU by slug, name or alias, such as h100-sxm.")
@click.option(
    "--target",
    "target_name",
    required=True,
    help="Name of a target, a model folder, its config.json, or a hub id.",
)
@click.option(
    "--engine",
    type=click.Choice(["vllm", "sglang", "trtllm"]),
    default="vllm",
    show_default=True,
    help="Engine whose kernels were measured.",
)
@click.option("--tp", "tensor_parallel", default=1, show_default=True,
              type=click.IntRange(min=1), help="Tensor-parallel degree.")  # fmt: skip
@click.option(
    "--operators",
    type=click.Path(path_type=Path),
    help="Folder of operator tables, <device>_<target>_tp<n> [default: published tables].",
)
@click.option("--source", default="", help="Source of the tables in --operators.")
@click.option("--output", type=click.Path(path_type=Path), help="File or folder to write to.")
@json_option
def command(target_name: str, as_json: bool, output: Path | None, **options: Any) -> None:
    """Compose a profile of a GPU that is not at hand from measured operators.

    Published times of matrix products, attention and experts are summed to forwards
    of the target: kernel times without the host, with an error bar. Needs
    `pip install 'rooftree[operators]'`, or a folder of operator tables.
    """
    from costmodel.catalog import resolve_target
    from costmodel.compose.profiles import ComposeOptions, compose

    target = resolve_target(target_name, hub=True).architecture
    profile = compose(ComposeOptions(target=target, **options))
    save_and_show(profile, output, as_json)


def save_and_show(profile: Profile, output: Path | None, as_json: bool) -> None:
    """Save a new profile and print its page, or JSON with its path.

    `output` is a `.yaml` file or a folder of profiles; None means the user's directory.
    """
    from costmodel.profile.store import ProfileStore
    from profiler.report.console import print_json
    from profiler.report.profiles import print_profile

    if output is None:
        path = ProfileStore().save(profile)
    elif output.suffix in (".yaml", ".yml") and not output.is_dir():
        ProfileStore.write(profile, output)
        path = output
    else:
        path = ProfileStore([output]).save(profile)
    error_bar = profile.provenance.error_bar
    if as_json:
        print_json({"path": str(path), "error_bar": error_bar, "profile": profile.as_dict()})
        return
    print_profile(path, profile)
    click.echo(f"\nprofile: {path}")
    if error_bar is not None:
        imported = profile.provenance.kind == "imported"
        where = (
            "at points left out of the fit" if imported else "to 256 rows and 16384 cached tokens"
        )
        click.echo(f"error bar: {error_bar:.1%} ({where})")
