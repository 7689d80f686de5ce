"""Reader of forward times in CSV, with a header and any unit."""

from __future__ import annotations

import csv
import math
from pathlib import Path

from costmodel.calibration.points import Points
from costmodel.errors import InputError
from costmodel.imports.table import ImportedTable, ShapeTimes
from costmodel.io import read_table

_TIMES = {
    "seconds": 1.0,
    "milliseconds": 1e-3,
    "microseconds": 1e-6,
    "forward_s": 1.0,
    "forward_ms": 1e-3,
    "forward_us": 1e-6,
}
_UNITS = {"_s": 1.0, "_ms": 1e-3, "_us": 1e-6}
_HINT = "Give a CSV with the columns new_tokens, context_tokens and seconds or microseconds"


def read_csv(path: Path, context: int | None = None) -> ImportedTable:
    """`read_points`, as a table of a tool that the file does not name."""
    return ImportedTable(
        points=read_points(path),
        tool="CSV table",
        version=None,
        runtime="kernels",
        lacks=("host time, as far as the table leaves it out",),
    )


def read_points(path: Path) -> Points:
    """Points from a CSV with `new_tokens`, `context_tokens`, a time, and optionally `batch`.

    Rows with an empty time are left out; repeats of a shape are averaged. The time is the column
    `seconds`, `milliseconds`, `microseconds` or `forward_(s|ms|us)`, else the only column whose
    name ends in a unit. Raises InputError with the line and the problem.
    """
    try:
        return _parse(csv.DictReader(read_table(path)), path)
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} is not a CSV table ({error})", hint=_HINT) from None


def _parse(table: csv.DictReader[str], path: Path) -> Points:
    names = {(name or "").strip().lower(): name for name in table.fieldnames or ()}
    missing = [name for name in ("new_tokens", "context_tokens") if name not in names]
    if missing:
        raise InputError(f"{path} has no column {' and no column '.join(missing)}", hint=_HINT)
    time, unit = _time_column(names, path)
    times = ShapeTimes(path, hint=_HINT)
    empty = True
    for row in table:
        cell = (row.get(names[time]) or "").strip()
        if not cell:
            continue
        at, empty = f"{path}, line {table.line_num}", False
        shape = (
            _whole(row, names, "new_tokens", 1, at),
            _whole(row, names, "context_tokens", 0, at),
            _whole(row, names, "batch", 1, at) if "batch" in names else 1,
        )
        times.add(shape, _seconds(cell, names[time], unit, at))
    if empty:
        raise InputError(f"{path} has no rows with a time in the column {names[time]}", hint=_HINT)
    return times.points()


def _time_column(names: dict[str, str], path: Path) -> tuple[str, float]:
    for name, unit in _TIMES.items():
        if name in names:
            return name, unit
    times = [(n, unit) for n in names for end, unit in _UNITS.items() if n.endswith(end)]
    if len(times) == 1:
        return times[0]
    problem = "no column of times" if not times else "several columns of times: "
    raise InputError(f"{path} has {problem}{', '.join(name for name, _ in times)}", hint=_HINT)


def _whole(row: dict[str, str], names: dict[str, str], name: str, least: int, at: str) -> int:
    cell = (row.get(names[name]) or "").strip()
    try:
        value = float(cell)
    except ValueError:
        raise InputError(f"{at}: {name} must be a whole number (is {cell!r})") from None
    if not math.isfinite(value) or value != int(value) or not least <= value < 1e9:
        raise InputError(f"{at}: {name} must be a whole number of {least} or more (is {cell})")
    return int(value)


def _seconds(cell: str, name: str, unit: float, at: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        raise InputError(f"{at}: {name} must be a number (is {cell!r})") from None
    if not math.isfinite(value) or value <= 0:
        raise InputError(f"{at}: {name} must be a finite number above 0 (is {cell})")
    return value * unit
