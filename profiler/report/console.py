"""Output of the commands: JSON or tables on stdout, notes and progress on stderr.

A command that reports something takes `--json` and prints its record with `print_json`, alone on
stdout; without it a person gets tables.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click

SCHEMA_VERSION = 1
# C0 and C1 controls but tab and newline, and the marks that turn the direction of text.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
NUMBER = re.compile(r"-?[\d.,]+[x%]?|-|None")
GAP = 2  # spaces between columns, and before further lines of a paragraph
HEADING = 8  # width to which a heading of several words is broken above narrower cells
RULE = "\N{BOX DRAWINGS LIGHT HORIZONTAL}"
WIDEST = 10_000  # of a table, which is broken here and not by rich
STEPS = 10  # lines of progress of a whole run where there is no terminal


def printable(text: str) -> str:
    """The text with controls spelt out, so that what a model or a file says steers no terminal."""
    return CONTROL.sub(lambda control: ascii(control[0])[1:-1], text)


def print_json(record: Mapping[str, Any], *, one_line: bool = False) -> None:
    """Print one JSON object with its `schema_version` and sorted keys on stdout.

    JSON has no NaN and no infinity: they become null. A record that is stored as a file too
    brings the `schema_version` of that file.

    one_line  without line breaks, for commands that print an object for each of several texts
    """
    text = json.dumps({"schema_version": SCHEMA_VERSION, **record}, default=dict)
    values = json.loads(text, parse_constant=lambda constant: None)
    click.echo(json.dumps(values, sort_keys=True, indent=None if one_line else 2))


def paragraph(text: str) -> str:
    """The text as lines no wider than the terminal, all but the first indented.

    A command between backticks is broken only where it is wider than a line.
    """
    width = shutil.get_terminal_size().columns - GAP

    def whole(command: re.Match[str]) -> str:
        return command[0].replace(" ", "\0") if len(command[0]) <= width else command[0]

    lines = _wrapped(re.sub("`[^`]*`", whole, printable(text)), width)
    return f"\n{' ' * GAP}".join(line.replace("\0", " ") for line in lines)


def note(text: str) -> None:
    """Print one line on stderr; stdout is for results."""
    click.echo(printable(text), err=True)


def note_at_once(text: str) -> None:
    """A note for a person who waits at a terminal, before something slow is imported."""
    if sys.stderr.isatty():
        note(text)


@contextlib.contextmanager
def progress(name: str) -> Iterator[tuple[Callable[[str], None], Callable[[float, str], None]]]:
    """The progress of something that loads the target first.

    Gives two functions: one prints a message, the other shows the share done and a few words.
    """
    from rich.console import Console

    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        told = 0

        def tell(share: float, state: str) -> None:
            nonlocal told
            if int(STEPS * share) > told:
                told = int(STEPS * share)
                console.print(f"{name}: {state}")

        yield console.print, tell
        return
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn(name), BarColumn(), TextColumn("{task.fields[state]}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=1.0, state="loading the target")
        yield console.print, lambda share, state: bar.update(task, completed=share, state=state)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str | None = None,
    keys: int = 1,
) -> None:
    """Print a plain table on stdout that is no wider than the terminal ($COLUMNS, else 80).

    Numbers are right-aligned, None is a dash. Where the columns are too wide together, they are
    printed in several blocks, or below the name of their row where that is long. Cells are never
    cut or broken; one that is wider than the terminal has a line to itself.

    keys  columns that name a row; every block begins with them
    """
    from rich.cells import cell_len

    room, every = shutil.get_terminal_size().columns, [*range(len(columns))]
    if title:
        click.echo("\n".join(_wrapped(_text(title), room)))
    table = [[_text(cell) for cell in row] for row in rows]
    cells = [[row[index] for row in table] for index in every]
    widest = [max(map(cell_len, column), default=0) for column in cells]
    heads = [[name] for name in columns]

    def width(group: Sequence[int]) -> int:
        widths = (max(widest[index], *map(cell_len, heads[index])) for index in group)
        return sum(widths) + GAP * (len(group) - 1)

    groups, below = [every], False
    if width(every) > room:
        heads = [_wrapped(columns[index], max(widest[index], HEADING)) for index in every]
        names = every[:keys]
        if below := any(width([*names, index]) > room for index in every[keys:]):
            names = []
        groups = [[*names]]
        for index in every[len(names) :]:
            if len(groups[-1]) > len(names) and width([*groups[-1], index]) > room - GAP * below:
                groups.append([*names])
            groups[-1].append(index)
    blocks = [_block([(heads[index], cells[index]) for index in group]) for group in groups]
    if below:  # a row has the lines of all groups, those with nothing to say left out
        indent = " " * GAP
        blocks = [[
            [*first, *(indent + line for row in others for line in row if line)]
            for first, *others in zip(*blocks, strict=True)
        ]]  # fmt: skip
    for number, (head, *body) in enumerate(blocks):
        rule = RULE * min(room, max(cell_len(line) for row in (head, *body) for line in row))
        lines = [*head, rule, *(line for row in body for line in row)]
        click.echo("\n".join(["", *lines] if number else lines))


def _block(columns: Sequence[tuple[list[str], list[str]]]) -> list[list[str]]:
    """The lines of the heading, then the line of each row; a column is a heading and its cells."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
    for head, cells in columns:
        numeric = bool(cells) and all(map(NUMBER.fullmatch, cells))
        title = Text("\n".join(head))
        table.add_column(title, justify="right" if numeric else "left", no_wrap=True)
    for row in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(*map(Text, row))
    drawn = io.StringIO()
    Console(file=drawn, width=WIDEST, color_system=None).print(table)
    lines = [line.rstrip() for line in drawn.getvalue().splitlines()]
    count = max(len(head) for head, _ in columns)
    return [lines[:count], *([line] for line in lines[count:])]


def print_facts(facts: Iterable[tuple[str, str | Path]]) -> None:
    """Print names and values on stdout, two columns; only values that are texts are broken."""
    width = shutil.get_terminal_size().columns
    pairs = [(name, value if isinstance(value, Path) else _text(value)) for name, value in facts]
    label = max((len(name) for name, _ in pairs), default=0) + GAP
    for name, value in pairs:
        lines = [_text(value)] if isinstance(value, Path) else _wrapped(value, width - label)
        for head, line in zip_longest([name], lines, fillvalue=""):
            click.echo(f"{head:<{label}}{line}".rstrip())


def _wrapped(text: str, room: int) -> list[str]:
    """The text broken at spaces into lines of at most `room` characters; words stay whole."""
    lines = textwrap.wrap(text, max(room, 1), break_long_words=False, break_on_hyphens=False)
    return lines or [""]


def _text(cell: object) -> str:
    """A cell as printable text on one line; None is a dash."""
    text = printable("-" if cell is None else str(cell))
    return text.replace("\n", r"\n").replace("\t", r"\t")
