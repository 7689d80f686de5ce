"""How commands speak: JSON or tables on stdout, notes for people on stderr."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import click

UNBROKEN_WIDTH = 300
NUMBER = re.compile(r"-?[\d.,]+[x%]?|-|None")


def print_json(value: Any) -> None:
    """One JSON document on stdout, keys in a fixed order; NaN and infinity are errors."""
    click.echo(json.dumps(value, indent=2, sort_keys=True, allow_nan=False))


def note(text: str) -> None:
    """One line for people, on stderr so that stdout stays for results."""
    click.echo(text, err=True)


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None
) -> None:
    """A plain table on stdout, numbers right-aligned, None as a dash.

    Lines are as wide as the terminal, and unbroken where stdout is none.
    """
    from io import StringIO

    from rich import box
    from rich.console import Console
    from rich.table import Table

    rows = [list(row) for row in rows]
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        numeric = all(NUMBER.fullmatch(str(row[index])) for row in rows)
        table.add_column(column, justify="right" if numeric and rows else "left")
    for row in rows:
        table.add_row(*("-" if cell is None else str(cell) for cell in row))
    terminal = Console()
    width = terminal.width if terminal.is_terminal else UNBROKEN_WIDTH
    page = StringIO()
    Console(file=page, width=width, highlight=False, markup=False).print(table)
    lines = [line.rstrip() for line in page.getvalue().splitlines()]
    click.echo("\n".join(line for line in lines if line))
