"""How commands speak: JSON or tables on stdout, notes for people on stderr."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import click


def print_json(value: Any) -> None:
    """One JSON document on stdout, keys in a fixed order; NaN and infinity are errors."""
    click.echo(json.dumps(value, indent=2, sort_keys=True, allow_nan=False))


def note(text: str) -> None:
    """One line for people, on stderr so that stdout stays for results."""
    click.echo(text, err=True)


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None
) -> None:
    """A plain table on stdout, numbers right-aligned; lines unbroken where it is no terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    rows = [list(row) for row in rows]
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        numeric = all(isinstance(row[index], int | float) for row in rows)
        table.add_column(column, justify="right" if numeric and rows else "left")
    for row in rows:
        table.add_row(*("-" if cell is None else str(cell) for cell in row))
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 240
    console.print(table)
