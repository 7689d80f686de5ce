"""`rooftree profiles`: list, show, check and draw profiles."""

from __future__ import annotations

from pathlib import Path

import click

from profiler.commands.options import PicturePath, json_option
from profiler.report.console import note, print_json, print_table


@click.group(invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """List, show, check and draw your own profiles and the shipped ones."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@command.command(name="list", short_help="List all profiles.")
@json_option
def list_profiles(as_json: bool) -> None:
    """List the profiles in your data directory and the shipped ones."""
    from costmodel.profile.store import ProfileStore
    from profiler.report.profiles import list_record

    store = ProfileStore()
    records = [list_record(stored) for stored in store.list()]
    if as_json:
        print_json({"profiles": records})
        return
    if not records:
        folders = " and ".join(str(folder) for folder in store.directories)
        note(f"There are no profiles in {folders}; `rooftree calibrate` makes one.")
        return
    columns = ("device", "target", "dtype", "runtime", "provenance", "grade", "created", "path")
    days = [{"created": record.get("created_utc", "")[:10] or None} for record in records]
    rows = [record | day for record, day in zip(records, days, strict=True)]
    print_table(columns, [[row.get(name) for name in columns] for row in rows])
    for record in records:
        if record["problem"]:
            note(f"cannot be used: {record['problem']}")


@command.command(short_help="Show one profile.")
@click.argument("name")
@click.option("--markdown", is_flag=True, help="As text for an issue or a pull request.")
@json_option
def show(name: str, markdown: bool, as_json: bool) -> None:
    """Show one profile. NAME is a path, or DEVICE/TARGET such as h100-sxm/qwen3-8b."""
    from costmodel.profile.lookup import named_profile
    from profiler.report.profiles import print_markdown, print_profile

    path, profile = named_profile(name)
    if as_json:
        print_json({"path": str(path), "profile": profile.as_dict()})
    elif markdown:
        print_markdown(profile, path)
    else:
        print_profile(path, profile)


@command.command(short_help="Check profile files.")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@json_option
def validate(names: tuple[str, ...], as_json: bool) -> None:
    """Check profiles: one line for each; exit code 3 when one cannot be used.

    NAME is a path, or DEVICE/TARGET such as h100-sxm/qwen3-8b.
    """
    from costmodel.errors import InputError, ProfileError
    from costmodel.profile.lookup import named_profile

    problems = dict.fromkeys(names, "")
    for name in problems:
        try:
            named_profile(name)[1].verify_calibration()
        except (ProfileError, InputError) as error:
            problems[name] = error.problem
    if as_json:
        checked = [{"path": path, "problem": problem} for path, problem in problems.items()]
        print_json({"profiles": checked})
    else:
        for path, problem in problems.items():
            click.echo(problem or f"{path}: ok")
    bad = sum(map(bool, problems.values()))
    if bad:
        raise ProfileError(f"{bad} of {len(problems)} profiles cannot be used")


@command.command(short_help="Draw a profile.")
@click.argument("name")
@click.argument("output", required=False, type=PicturePath(), metavar="[FILE.png|svg|pdf]")
@json_option
def plot(name: str, output: Path | None, as_json: bool) -> None:
    """Draw a profile. NAME is a path, or DEVICE/TARGET such as h100-sxm/qwen3-8b.

    Without a FILE the picture is a PNG in the current folder, named after the profile.
    """
    from costmodel.profile.lookup import named_profile
    from profiler.report.profiles import plot_profile

    path, profile = named_profile(name)
    picture = plot_profile(profile, output or Path(f"{path.stem}.png"))
    if as_json:
        print_json({"path": str(path), "picture": str(picture)})
    else:
        click.echo(picture)
