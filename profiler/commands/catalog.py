"""`rooftree support`, `devices`, `targets` and `doctor`: what is known without measuring."""

from __future__ import annotations

import contextlib
from dataclasses import asdict

import click

from profiler.commands.options import json_option
from profiler.report.console import print_facts, print_json


@click.command(short_help="List what is known of each target on each device.")
@click.argument("name", required=False)
@json_option
def support(name: str | None, as_json: bool) -> None:
    """List where the times of each target on each device come from.

    Your own profiles count too. With the NAME of a device or a target, every row also has
    its error bar, or the reason why there are no times.
    """
    from costmodel.catalog import TargetEntry, find_device, find_target, nearest_names
    from costmodel.compose.support import supported
    from costmodel.errors import InputError
    from profiler.report.catalog import print_matrix, print_support

    rows = supported()
    if name is not None:
        names = {label: label for row in rows for label in (row.device, row.target)}
        wanted = {name}
        for find in (find_target, find_device):
            with contextlib.suppress(InputError):
                found = find(name)
                wanted.add(found.name if isinstance(found, TargetEntry) else found.slug)
        if not wanted & names.keys():
            near = nearest_names(name.lower(), {label.lower(): label for label in names})
            raise InputError(
                f"no target and no device is called '{name}'", hint=f"Nearest: {', '.join(near)}"
            )
        rows = [row for row in rows if wanted & {row.device, row.target}]
    if as_json:
        print_json({"support": [asdict(row) for row in rows]})
    elif name is not None:
        print_support(rows)
    else:
        print_matrix(rows)


@click.command(short_help="List known devices and their figures.")
@click.argument("name", required=False)
@json_option
def devices(name: str | None, as_json: bool) -> None:
    """List the devices in calibrations/devices.yaml, or all that is known of NAME.

    Rates are dense, of 16-bit, FP8 and FP4 products, in TFLOP/s.
    """
    from costmodel.catalog import find_device, load_devices
    from profiler.report.catalog import print_devices, print_record

    specs = [find_device(name)] if name else list(load_devices().values())
    if as_json:
        print_json({"devices": [asdict(spec) for spec in specs]})
    elif name:
        print_record(asdict(specs[0]))
    else:
        print_devices(specs)


@click.command(short_help="List known targets and their sizes.")
@click.argument("name", required=False)
@json_option
def targets(name: str | None, as_json: bool) -> None:
    """List the targets in calibrations/targets.yaml, or all that is known of NAME.

    NAME may also be a model folder, a config.json, or a hub id, whose config is
    fetched. Parameters are in billions; cache is kB of one token in bfloat16.
    """
    from costmodel.catalog import load_targets, resolve_target
    from profiler.report.catalog import print_record, print_targets, target_record

    entries = [resolve_target(name, hub=True)] if name else list(load_targets().values())
    if as_json:
        print_json({"targets": [target_record(entry) for entry in entries]})
    elif name:
        print_record(target_record(entries[0]))
    else:
        print_targets(entries)


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Check versions, device, data directory, profile, demo model and busy processes.

    Nothing is changed, except that a missing data directory is created.
    """
    from profiler.checks import next_step, run_checks

    checks = run_checks()
    if as_json:
        print_json({"checks": [asdict(check) for check in checks], "next": next_step(checks)})
        return
    lines = (f"{check.status}: {check.found}. {check.advice}".rstrip(". ") for check in checks)
    print_facts(zip((check.name for check in checks), lines, strict=True))
    click.echo(f"Next: {next_step(checks)}")
