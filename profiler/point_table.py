"""Tables of forward times: a CSV with new_tokens, context_tokens and a time."""

from __future__ import annotations

import csv
import math
from pathlib import Path

from costmodel.errors import InputError
from costmodel.points import Points

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
MOST_ROWS = 200_000


def read_points(path: Path) -> Points:
    """Read a table; rows with an empty time are left out, repeats of a shape averaged.

    The time is the column `seconds`, `milliseconds`, `microseconds` or `forward_(s|ms|us)`,
    else the only one whose name ends in a unit. Raises InputError with the line and what is
    wrong there.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            return _parse(csv.DictReader(stream), path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}", hint=_HINT) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} is not a CSV table ({error})", hint=_HINT) from None


def _parse(table: csv.DictReader[str], path: Path) -> Points:
    names = {(name or "").strip().lower(): name for name in table.fieldnames or ()}
    missing = [name for name in ("new_tokens", "context_tokens") if name not in names]
    if missing:
        raise InputError(f"{path} has no column {' and no column '.join(missing)}", hint=_HINT)
    time, unit = _time_column(names, path)
    shapes: dict[tuple[int, int, int], list[float]] = {}
    for row in table:
        if len(shapes) > MOST_ROWS:
            raise InputError(f"{path} has more than {MOST_ROWS} shapes", hint=_HINT)
        cell = (row.get(names[time]) or "").strip()
        if not cell:
            continue
        at = f"{path}, line {table.line_num}"
        shape = (
            _whole(row, names, "new_tokens", 1, at),
            _whole(row, names, "context_tokens", 0, at),
            _whole(row, names, "batch", 1, at) if "batch" in names else 1,
        )
        shapes.setdefault(shape, []).append(_seconds(cell, names[time], unit, at))
    if not shapes:
        raise InputError(f"{path} has no rows with a time in the column {names[time]}", hint=_HINT)
    seconds = [sum(times) / len(times) for times in shapes.values()]
    rows, context, batch = zip(*shapes, strict=True)
    points = Points(rows=rows, context=context, batch=batch, seconds=seconds)
    _check(points, path)
    return points


def _time_column(names: dict[str, str], path: Path) -> tuple[str, float]:
    for name, unit in _TIMES.items():
        if name in names:
            return name, unit
    found = [(n, unit) for n in names for end, unit in _UNITS.items() if n.endswith(end)]
    if len(found) == 1:
        return found[0]
    problem = "no column of times" if not found else "several columns of times: "
    raise InputError(f"{path} has {problem}{', '.join(name for name, _ in found)}", hint=_HINT)


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


def _check(points: Points, path: Path) -> None:
    if len(points) < 4:
        raise InputError(
            f"{path} has {len(points)} shapes with a time, and a fit needs 4 or more", hint=_HINT
        )
    if len(set(points.seconds.tolist())) == 1:
        raise InputError(
            f"all times in {path} are the same, which no measurement gives",
            hint="Check where the times come from",
        )
    if len(set(points.rows.tolist())) < 2:
        raise InputError(
            f"{path} has one row count only (new_tokens = {points.rows[0]:g})",
            hint="Measure several row counts",
        )
