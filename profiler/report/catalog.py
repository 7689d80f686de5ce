"""Tables and records of known devices, known targets, and the times of each pair."""

from __future__ import annotations

import shutil
import string
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import click

from costmodel.catalog import DeviceSpec, TargetEntry
from costmodel.compose.operators import unread_parts
from costmodel.compose.support import Support
from costmodel.hf_config import text_fields
from profiler.report.console import print_facts, print_table

# Origins of times, whose first letters stand for them, in the order of the legend.
ORIGINS = {
    "measured": "measured here",
    "quick": "quick probe here",
    "imported": "imported from another tool's file",
    "composed": "composed from operator tables",
    "transferred": "transferred from another device",
    "datasheet": "data sheet",
    "operators": "no profile; plans compose one from operator tables",
    "scaled": "no profile; plans scale another device's",
}


def print_devices(specs: Sequence[DeviceSpec]) -> None:

    def tera(rate: float | None) -> str | None:
        return None if rate is None else f"{rate / 1e12:.0f}"

    rows = [
        (
            spec.slug,
            f"{spec.memory_bytes / 2**30:.0f}",
            f"{spec.peak_bytes_per_s / 1e9:.0f}",
            tera(spec.peak_flops_per_s),
            tera(spec.fp8_flops_per_s),
            tera(spec.fp4_flops_per_s),
            spec.sm_count,
            f"{spec.tdp_w:.0f}",
            "yes" if spec.confidence == "corroborated" else "no",
        )
        for spec in specs
    ]
    print_table(("device", "GiB", "GB/s", "16-bit", "FP8", "FP4", "SMs", "W", "checked"), rows)
    click.echo(
        "Rates in dense TFLOP/s. checked: a second source agrees with the data sheet.\n"
        "`rooftree devices NAME` shows names, source and notes of one."
    )


def target_record(entry: TargetEntry) -> dict[str, Any]:
    """The fields of one target for `targets`: its architecture and what follows from it."""
    a = entry.architecture
    return {
        **a.to_dict(),
        "name": entry.name,
        "kind": _kind(entry),
        "architecture_hash": a.hash,
        "parameters": a.parameters,
        "active_parameters": a.active_parameters,
        "cache_bytes_per_token": 2 * a.token_values,
        "state_bytes": int(a.state_bytes()),
        "positions": entry.positions,
        "plan": "from a profile, stored or composed from operator tables"
        + (f"; estimated: {', '.join(parts)}" if (parts := unread_parts(a)) else ""),
    }


def print_targets(entries: Sequence[TargetEntry]) -> None:
    """Print one line for each target, and why some cannot be planned from operator tables."""

    def billions(count: int) -> str:
        return f"{count / 1e9:.3g}" if count < 1e11 else f"{count / 1e9:.0f}"

    rows = [
        (
            entry.name.rpartition("/")[2],
            _kind(entry),
            billions(entry.architecture.parameters),
            billions(entry.architecture.active_parameters),
            f"{2 * entry.architecture.token_values / 1e3:.0f}",
            "partly" if unread_parts(entry.architecture) else "yes",
        )
        for entry in entries
    ]
    print_table(("target", "kind", "size", "active", "cache", "plan"), rows)
    click.echo(
        "size and active: billions of parameters; cache: kB of a token in bfloat16.\n"
        "plan: `partly` where parts are estimated, of which no operator tables are read.\n"
        "Any hub id or config.json works too; `rooftree targets NAME` shows one."
    )


def _kind(entry: TargetEntry) -> str:
    return str(text_fields(entry.hf_config).get("model_type"))


def print_record(record: Mapping[str, Any]) -> None:
    """Print the fields of one record, one a line; empty ones are left out."""

    def text(value: Any) -> str:
        if isinstance(value, (list, tuple)):
            return ", ".join(map(str, value))
        large = isinstance(value, float) and value >= 1e12
        return f"{value / 1e12:,.6g} T" if large else str(value)

    said = record.items()
    print_facts((name, text(value)) for name, value in said if value not in (None, "", (), []))


def print_support(rows: Sequence[Support]) -> None:
    """Print one line for each pair: its origin and error bar, or why there are no times."""
    print_table(
        ("device", "target", "times", "tp", "error bar"),
        [
            (
                row.device,
                _title(row),
                row.provenance,
                ",".join(map(str, row.degrees)) or None,
                None if row.error_bar is None else f"{row.error_bar:.1%}",
            )
            for row in rows
        ],
    )
    for reason, timed in dict.fromkeys((row.reason, bool(row.provenance)) for row in rows):
        if reason:
            click.echo(reason if timed else f"without times: {reason}")


def _title(row: Support) -> str:
    """The target's short name, and the label of quantised weights behind it."""
    return " ".join(filter(None, (row.target.rpartition("/")[2], row.weights)))


def print_matrix(rows: Sequence[Support]) -> None:
    """Print targets by devices, one letter for the origin of the times of each pair."""
    cells = {(_title(row), row.device): (row.provenance or "-")[0] for row in rows}
    targets = list(dict.fromkeys(map(_title, rows)))
    devices = [
        slug
        for slug in dict.fromkeys(row.device for row in rows)
        if any(cells.get((target, slug), "-") != "-" for target in targets)
    ]
    names = string.ascii_uppercase + string.digits + string.ascii_lowercase
    labels = dict(zip(devices, names, strict=False))
    times = [(target, *(cells.get((target, slug)) for slug in devices)) for target in targets]
    print_table(("target", *labels.values()), times)
    click.echo()
    for slug, label in labels.items():
        click.echo(f"{label} {slug}")
    used = {letter for letter in cells.values() if letter != "-"}
    legend = [f"{name[0]} {meaning}" for name, meaning in ORIGINS.items() if name[0] in used]
    click.echo("\n" + "\n".join(legend))
    absent = [slug for slug in dict.fromkeys(row.device for row in rows) if slug not in devices]
    if absent:
        click.echo("\nNo times of any target; `rooftree transfer` scales a profile to them:")
        width = shutil.get_terminal_size().columns
        click.echo(textwrap.fill(", ".join(absent), width, break_on_hyphens=False))
