"""Output of the commands: JSON or tables on stdout, notes and progress on stderr.

A command that reports something takes `--json` and prints its record with `print_json`, alone on
stdout; without it a person gets tables.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click

SCHEMA_VERSION = 1
# C0 and C1 controls but tab and newline, and the marks that turn the direction of text.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
NUMBER = re.compile(r"-?[\d.,]+[x%]?|-|None")
GAP, INDENT = 2, 2  # spaces between columns, and before those below their row's name
HEADING = 8  # width to which a heading of several words is broken above narrower cells
RULE = "\N{BOX DRAWINGS LIGHT HORIZONTAL}"
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
    layout: dict[str, Any] = {} if one_line else {"indent": 2}
    values = _finite({"schema_version": SCHEMA_VERSION, **record})
    click.echo(json.dumps(values, sort_keys=True, allow_nan=False, **layout))


def _finite(value: Any) -> Any:
    """The value with null for every number that JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


def paragraph(text: str) -> str:
    """The text as lines no wider than the terminal, all but the first indented.

    A command between backticks is broken only where it is wider than a line.
    """
    width = shutil.get_terminal_size().columns - INDENT

    def whole(command: re.Match[str]) -> str:
        return command[0].replace(" ", "\0") if len(command[0]) <= width else command[0]

    lines = _wrapped(re.sub("`[^`]*`", whole, printable(text)), width)
    return f"\n{' ' * INDENT}".join(line.replace("\0", " ") for line in lines)


def note(text: str) -> None:
    """Print one line on stderr; stdout is for results."""
    click.echo(printable(text), err=True)


def note_at_once(text: str) -> None:
    """A note for a person who waits at a terminal, before something slow is imported."""
    if sys.stderr.isatty():
        note(text)


@dataclass(frozen=True, slots=True)
class Progress:
    """Prints messages, and shows the share that is done with a few words."""

    say: Callable[[str], None]
    update: Callable[[float, str], None]

    def count(self, done: int, of: int) -> None:
        self.update(done / of, f"{done} of {of}")


@contextlib.contextmanager
def progress(name: str) -> Iterator[Progress]:
    """The progress of something that loads the target first."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        told = 0

        def tell(share: float, state: str) -> None:
            nonlocal told
            if int(STEPS * share) > told:
                told = int(STEPS * share)
                console.print(f"{name}: {state}")

        yield Progress(console.print, tell)
        return
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn(name), BarColumn(), TextColumn("{task.fields[state]}"))
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=1.0, state="loading the target")
        yield Progress(
            console.print, lambda share, state: bar.update(task, completed=share, state=state)
        )


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
    width = shutil.get_terminal_size().columns
    if title:
        click.echo("\n".join(_wrapped(_text(title), width)))
    click.echo("\n".join(table_lines(columns, rows, width, keys=keys)))


def print_facts(facts: Iterable[tuple[str, str | Path]]) -> None:
    """Print names and values on stdout, two columns; only values that are texts are broken."""
    width = shutil.get_terminal_size().columns
    pairs = [(name, value if isinstance(value, Path) else _text(value)) for name, value in facts]
    label = max((len(name) for name, _ in pairs), default=0) + GAP
    for name, value in pairs:
        lines = [_text(value)] if isinstance(value, Path) else _wrapped(value, width - label)
        for head, line in zip_longest([name], lines, fillvalue=""):
            click.echo(f"{head:<{label}}{line}".rstrip())


def table_lines(
    columns: Sequence[str], rows: Iterable[Sequence[object]], width: int, *, keys: int = 1
) -> list[str]:
    """The lines of a table, as `print_table` prints it at this width."""
    cells = [[_text(cell) for cell in row] for row in rows]
    table = [_Column([name], [row[index] for row in cells]) for index, name in enumerate(columns)]
    if _width(table) <= width:
        return [*_block([table], len(cells), width)]
    narrow = [column.narrowed() for column in table]
    head, rest = narrow[:keys], narrow[keys:]
    room = width - _width(head) - GAP
    if all(column.width <= room for column in rest):
        blocks = [_block([[*head, *some]], len(cells), width) for some in _packed(rest, room)]
        return [line for block in blocks for line in (*block, "")][:-1]
    return [*_block(_packed(narrow, width - INDENT), len(cells), width)]


@dataclass(frozen=True, slots=True)
class _Column:
    """One column: the lines of its heading, and its cells."""

    head: list[str]
    cells: list[str]

    @property
    def width(self) -> int:
        return max(map(_length, (*self.head, *self.cells)))

    @property
    def numeric(self) -> bool:
        return bool(self.cells) and all(map(NUMBER.fullmatch, self.cells))

    def narrowed(self) -> _Column:
        """The column with its heading broken at spaces."""
        widest = max(map(_length, self.cells), default=0)
        return _Column(_wrapped(" ".join(self.head), max(widest, HEADING)), self.cells)


def _packed(columns: Sequence[_Column], room: int) -> list[list[_Column]]:
    """The columns in groups of neighbours that are at most `room` wide where they can be."""
    groups: list[list[_Column]] = []
    for column in columns:
        if groups and _width([*groups[-1], column]) <= room:
            groups[-1].append(column)
        else:
            groups.append([column])
    return groups


def _width(columns: Sequence[_Column]) -> int:
    return sum(column.width for column in columns) + GAP * (len(columns) - 1)


def _block(groups: Sequence[Sequence[_Column]], count: int, width: int) -> Iterator[str]:
    """Heading, rule and rows; a row's groups stand below each other, all but the first indented."""
    indents = [0] + [INDENT] * (len(groups) - 1)
    for group, indent in zip(groups, indents, strict=True):
        yield from _row(group, [column.head for column in group], indent)
    widest = max(_width(group) + indent for group, indent in zip(groups, indents, strict=True))
    yield RULE * min(widest, width)
    for index in range(count):
        for group, indent in zip(groups, indents, strict=True):
            lines = _row(group, [[column.cells[index]] for column in group], indent)
            yield from (line for line in lines if line or not indent)  # nothing to say below


def _row(columns: Sequence[_Column], cells: Sequence[list[str]], indent: int) -> Iterator[str]:
    for parts in zip_longest(*cells, fillvalue=""):
        padded = [
            " " * (column.width - _length(part)) + part
            if column.numeric
            else part + " " * (column.width - _length(part))
            for column, part in zip(columns, parts, strict=True)
        ]
        yield (" " * indent + (" " * GAP).join(padded)).rstrip()


def _wrapped(text: str, room: int) -> list[str]:
    """The text broken at spaces into lines of at most `room` characters; words stay whole."""
    lines = textwrap.wrap(text, max(room, 1), break_long_words=False, break_on_hyphens=False)
    return lines or [""]


def _length(text: str) -> int:
    """The terminal's columns that a text takes."""
    from rich.cells import cell_len

    return cell_len(text)


def _text(cell: object) -> str:
    """A cell as printable text on one line; None is a dash."""
    text = printable("-" if cell is None else str(cell))
    return text.replace("\n", r"\n").replace("\t", r"\t")
