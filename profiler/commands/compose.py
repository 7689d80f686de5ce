"""`rooftree compose`: a profile without the GPU, from measured operators."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from costmodel.profile import Profile


@click.command(name="compose")
@click.option("--device", "device_name", help="GPU by slug or name, such as h100-sxm.")
@click.option("--target", "target_name", required=True, help="Known target or model folder.")
@click.option(
    "--engine",
    type=click.Choice(["vllm", "sglang", "trtllm"]),
    default="vllm",
    show_default=True,
    help="Whose kernels were measured.",
)
@click.option("--tp", "tensor_parallel", default=1, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--operators",
    type=click.Path(path_type=Path),
    help="Folder of operator tables, <device>_<target>_tp<n> [default: published ones].",
)
@click.option("--source", default="", help="Where the tables in --operators come from.")
@click.option("--output", type=click.Path(path_type=Path), help="File or folder to write to.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
def command(as_json: bool, output: Path | None, **options: Any) -> None:
    """Compose a profile of a GPU that is not at hand from measured operators.

    Sums published measurements of matrix products, attention and experts into
    forwards of the target: kernel times without the host, with an error bar.
    Needs `pip install 'rooftree[operators]'`, or a folder of operator tables.
    """
    from profiler.composing import ComposeOptions, compose, store

    profile = compose(ComposeOptions(**options))
    show(profile, store(profile, output), as_json)


def show(profile: Profile, path: Path, as_json: bool) -> None:
    """The new profile on stdout: its page, or JSON."""
    from profiler.profile_views import print_profile
    from profiler.render import print_json

    made = profile.provenance
    if as_json:
        print_json({"path": str(path), "error_bar": made.error_bar, "profile": profile.as_dict()})
        return
    print_profile(path, profile)
    click.echo(f"\nprofile: {path}")
    if made.error_bar is not None:
        click.echo(f"error bar: {made.error_bar:.1%} (to 256 rows and 4096 cached tokens)")
