"""`rooftree compose` and `transfer`: a profile of a GPU that is not at hand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from profiler.commands.options import OutputPath, json_option
from profiler.report.console import note, print_json

if TYPE_CHECKING:
    from costmodel.profile.profile import Profile


@click.command(name="compose")
@click.option("--device", "device_name", help="GPU by slug, name or alias, such as h100-sxm.")
@click.option("--target", "target_name", required=True,
              help="Name of a target, a model folder, its config.json, or a hub id.")  # fmt: skip
@click.option("--tp", "tensor_parallel", default=1, show_default=True,
              type=click.IntRange(min=1), help="Tensor-parallel degree.")  # fmt: skip
@click.option("--operators", default="vllm", show_default=True,
              help="Published tables of the kernels of vllm, sglang or trtllm; or a folder of "
              "tables, <device>_<target>_tp<n>.")  # fmt: skip
@click.option("--source", default="", help="Source of the tables in a folder.")
@click.option("--output", type=OutputPath("either"), help="File or folder to write to.")
@json_option
def compose(
    target_name: str, operators: str, as_json: bool, output: Path | None, **options: Any
) -> None:
    """Compose a profile of a GPU that is not at hand from measured operators.

    Published times of matrix products, attention and experts are summed to forwards
    of the target: kernel times without the host, with an error bar. Needs
    `pip install 'rooftree[operators]'`, or a folder of operator tables.
    """
    from costmodel.catalog import resolve_target
    from costmodel.compose.profiles import ComposeOptions
    from costmodel.compose.profiles import compose as compose_profile
    from costmodel.compose.tables import published_tables

    published = operators in published_tables().engines
    options |= {"engine": operators} if published else {"operators": Path(operators)}
    target = resolve_target(target_name, hub=True).architecture
    profile = compose_profile(ComposeOptions(target=target, **options))
    save_and_show(profile, output, as_json)


@click.command(name="transfer")
@click.argument("name", metavar="PROFILE")
@click.argument("device_name", metavar="DEVICE")
@click.option("--output", type=OutputPath("either"), help="File or folder to write to.")
@json_option
def transfer(name: str, device_name: str, output: Path | None, as_json: bool) -> None:
    """Scale a profile to another GPU by both data sheets.

    PROFILE is a path, or DEVICE/TARGET such as h100-sxm/qwen3-8b; DEVICE is a GPU by slug, name
    or alias. Memory-bound time scales by bandwidth, compute-bound time by FLOPs. The error
    bar is from a study of all GPU pairs at hand: within a chip it is smallest,
    across vendors largest.
    """
    from costmodel.catalog import find_device
    from costmodel.compose.transfer import transfer_errors, transfer_profile
    from costmodel.errors import ProfileError
    from costmodel.profile.lookup import named_profile
    from costmodel.profile.store import ProfileStore

    _, profile = named_profile(name)
    device = find_device(device_name)
    scaled = transfer_profile(profile, device)
    if output is None and (better := ProfileStore().better(scaled)):
        raise ProfileError(
            f"not written, since it would hide a better profile: {better}",
            hint="Give --output for a file of it",
        )
    save_and_show(scaled, output, as_json)
    if not as_json:
        click.echo(f"transfer: {transfer_errors().text(profile.device.slug, device.slug)}")


def save_and_show(profile: Profile, output: Path | None, as_json: bool) -> None:
    """Save a new profile and print its page, or JSON with its path.

    `output` is a `.yaml` file or a folder of profiles; None means the user's directory.
    """
    from costmodel.profile.store import ProfileStore
    from profiler.report.profiles import print_profile

    if output is None or output.suffix not in (".yaml", ".yml") or output.is_dir():
        path, aside = ProfileStore(None if output is None else [output]).put(profile)
    else:
        path, aside = ProfileStore().put(profile, output)
    if aside:
        note(
            f"The stored profile stays: the new one is in {path}, since {aside}. To replace it, "
            "move it away and run this again."
        )
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
