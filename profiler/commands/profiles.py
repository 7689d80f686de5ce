"""`rooftree profiles`: list, show, check and draw profiles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from costmodel.profile import Profile

as_json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print the result as JSON on stdout."
)


@click.group(invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """List, show, check and draw profiles: those you made and those shipped."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@command.command(name="list", short_help="List all profiles.")
@as_json_option
def list_profiles(as_json: bool) -> None:
    """List every profile in your data directory and in the shipped one."""
    from costmodel.registry import ProfileStore
    from profiler.profile_views import list_record
    from profiler.render import note, print_json, print_table

    store = ProfileStore()
    records = [list_record(stored) for stored in store.list()]
    if as_json:
        print_json(records)
        return
    if not records:
        places = " and ".join(str(folder) for folder in store.directories)
        note(f"There are no profiles in {places}; `rooftree calibrate` makes one.")
        return
    columns = ("device", "target", "dtype", "runtime", "provenance", "created_utc", "path")
    print_table(columns, [[record.get(name) for name in columns] for record in records])
    for record in records:
        if record["problem"]:
            note(f"cannot be used: {record['problem']}")


@command.command(short_help="Show one profile.")
@click.argument("name")
@as_json_option
def show(name: str, as_json: bool) -> None:
    """Show one profile: NAME is a path, or a part of a path that `list` prints."""
    from profiler.profile_views import find_profile, print_profile
    from profiler.render import print_json

    path, profile = find_profile(name)
    if as_json:
        print_json({"path": str(path), "profile": profile.as_dict()})
    else:
        print_profile(path, profile)


@command.command(short_help="Check profile files.")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@as_json_option
def validate(paths: tuple[Path, ...], as_json: bool) -> None:
    """Check profile files: one line a file, exit code 3 when one cannot be used."""
    from costmodel.errors import ProfileError
    from profiler.profile_views import problem_of
    from profiler.render import print_json

    problems = {str(path): problem_of(path) for path in paths}
    if as_json:
        print_json([{"path": path, "problem": problem} for path, problem in problems.items()])
    else:
        for path, problem in problems.items():
            click.echo(problem or f"{path}: ok")
    bad = sum(1 for problem in problems.values() if problem)
    if bad:
        raise ProfileError(f"{bad} of {len(problems)} profiles cannot be used")


@command.command(short_help="Draw a profile as a PNG.")
@click.argument("name")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The PNG file to write; by default beside you, named after the profile.",
)
@as_json_option
def plot(name: str, output: Path | None, as_json: bool) -> None:
    """Draw a profile: NAME is a path, or a part of a path that `list` prints."""
    from profiler.profile_views import find_profile
    from profiler.render import print_json

    path, profile = find_profile(name)
    picture = output or Path(f"{path.stem}.png")
    _plot(profile, picture)
    if as_json:
        print_json({"path": str(path), "picture": str(picture)})
    else:
        click.echo(picture)


def _plot(profile: Profile, picture: Path) -> None:
    from costmodel.errors import InputError
    from profiler.report import plot_profile

    try:
        plot_profile(profile, picture)
    except OSError as error:
        raise InputError(
            f"cannot write {picture}: {error.strerror or error}",
            hint="Give another file with --output.",
        ) from error
