"""Text of a profile: columns as tables, YAML with six significant digits, and one-line errors.

A section holds arrays of one length: the axes of its points and the values there. In a file

- points that fill most of a grid, in its order, have each axis once, and of each value one
  line along the last axis for every place on the axes before it, null where there is no point;
- other points have the arrays;
- a column that is the same everywhere is one number; a column of unknown spreads is left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import chain, product
from math import prod
from numbers import Real
from typing import Any, ClassVar

import yaml
from pydantic import SerializerFunctionWrapHandler, model_serializer, model_validator

from costmodel import errors
from costmodel.fields import Section

SPREAD = "mad_s"
LEAST_FILLED = 0.6
HEADER = "# rooftree calibration profile; docs/profile-format.md explains every field\n"

CELL = 9  # characters of most numbers
_TABLE_LINE = re.compile(r"^( *- \[)([^]]+)\]$", re.MULTILINE)

MOST_LINE, MOST_NAME, MOST_VALUE = 300, 60, 40  # characters in an error

_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _ProfileDumper(_Dumper):  # type: ignore[misc]
    """Sequences in flow style, floats with six significant digits, no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_sequence(dumper: Any, data: Any) -> Any:
    table = any(isinstance(line, list) for line in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=not table)


def float_text(value: float) -> str:
    """Six significant digits in a form that YAML 1.1 reads back as a float."""
    if not math.isfinite(value):
        return {math.inf: ".inf", -math.inf: "-.inf"}.get(value, ".nan")
    mantissa, mark, exponent = f"{value:.6g}".partition("e")
    return mantissa + ("" if "." in mantissa else ".0") + mark + exponent


_ProfileDumper.add_representer(list, _represent_sequence)
_ProfileDumper.add_representer(tuple, _represent_sequence)
_ProfileDumper.add_representer(
    float, lambda dumper, data: dumper.represent_scalar("tag:yaml.org,2002:float", float_text(data))
)


def dump_yaml(data: Mapping[str, Any]) -> str:
    """YAML text of plain values, in the given order."""
    body: str = yaml.dump(
        dict(data),
        Dumper=_ProfileDumper,
        sort_keys=False,
        default_flow_style=False,
        allow_unicode=True,
        width=100,
    )
    return HEADER + _TABLE_LINE.sub(_aligned, body)


def _aligned(line: re.Match[str]) -> str:
    """A line of a table as one line of the file, its cells of one width."""
    cells = [cell.strip() for cell in line[2].split(",")]
    width = CELL if "." in line[2] else max(map(len, cells))
    return f"{line[1]}{', '.join(f'{cell:<{width}}' for cell in cells[:-1])}, {cells[-1]}]"


def describe_error(error: Mapping[str, Any]) -> str:
    """One pydantic error as one line of bounded length: 'stages.plain.median_s[3]: problem'."""
    kind, value, path = str(error["type"]), shown(error.get("input")), ""
    for part in error["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{_printable(part, MOST_NAME)}"
    if kind == "missing":
        problem = "is missing"
    elif kind == "extra_forbidden":
        problem = "is not a known field"
    elif kind == "value_error":
        problem = str(error["ctx"]["error"])
    elif kind == "tuple_type":
        problem = f"must be a list (is {value})"
    elif kind in ("model_type", "model_attributes_type", "is_instance_of", "dict_type"):
        problem = f"must be a mapping (is {value})"
    else:
        problem = re.sub(r"^\w+ should", "must", f"{error['msg']} (is {value})")
    where = path.lstrip(".") or "the file"
    return _printable(" ".join(f"{where}: {problem}".split()), MOST_LINE)


def shown(value: Any) -> str:
    """A value of a file in a few words."""
    if value is None:
        return "empty"
    if isinstance(value, (list, tuple, set)):
        return f"a list of {len(value)}"
    if isinstance(value, Mapping):
        return "a mapping"
    return _printable(errors.shown(value), MOST_VALUE)


def _printable(text: str, most: int) -> str:
    """The text, cut to `most` characters, without characters that steer a terminal."""
    text = text if len(text) <= most else text[: most - 3] + "..."
    return "".join(letter if letter.isprintable() else "?" for letter in text)


class ColumnsSection(Section):
    """Arrays of one length, the points' axes and the values there; a file has them packed."""

    axes: ClassVar[tuple[str, ...]]
    values: ClassVar[tuple[str, ...]] = ("median_s", "mad_s", "n")

    @model_validator(mode="before")
    @classmethod
    def _unpack(cls, data: Any) -> Any:
        return unpacked(data, cls.axes, cls.values) if isinstance(data, Mapping) else data

    @model_serializer(mode="wrap")
    def _pack(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return packed(dump(self), self.axes, self.values)


def packed(fields: Mapping[str, Any], axes: Sequence[str], values: Sequence[str]) -> dict[str, Any]:
    """The fields of a section, its columns as a file has them, the values behind the axes."""
    written = {name: fields[name] for name in sorted(fields, key=lambda name: name in values)}
    for name in (*axes, *values):
        if len(set(fields[name])) == 1:
            written[name] = fields[name][0]
    points = list(zip(*(fields[axis] for axis in axes), strict=True))
    places = {axis: sorted(set(fields[axis])) for axis in axes}
    varying = [axis for axis in axes if len(places[axis]) > 1]
    filled = len(points) >= LEAST_FILLED * prod(map(len, places.values()))
    tables = [name for name in values if isinstance(written[name], Sequence)]
    if len(varying) > 1 and filled and values[0] in tables and points == sorted(set(points)):
        grid, length = list(product(*places.values())), len(places[varying[-1]])
        for name in tables:
            at = dict(zip(points, fields[name], strict=True))
            lines = [grid[i : i + length] for i in range(0, len(grid), length)]
            written[name] = [[at.get(point) for point in line] for line in lines]
        written |= {axis: places[axis] for axis in varying}
    return {name: value for name, value in written.items() if value is not None}


def unpacked(
    fields: Mapping[str, Any], axes: Sequence[str], values: Sequence[str]
) -> dict[str, Any]:
    """The fields of a section, its columns as arrays. Raises ValueError for missing lines.

    What is neither a table nor one number stays as it is.
    """
    columns = {name: fields[name] for name in (*axes, *values) if fields.get(name) is not None}
    places = {a: one if isinstance(one := columns.get(a), list) else [one] for a in axes}
    if _is_table(columns.get(values[0])):
        tables = {name: one for name, one in columns.items() if _is_table(one)}
        varying = {axis: place for axis, place in places.items() if len(place) > 1}
        cells = {name: _joined(name, lines, varying) for name, lines in tables.items()}
        filled = [i for i, cell in enumerate(cells[values[0]]) if cell is not None]
        grid = list(product(*places.values()))
        columns |= {name: [cells[name][i] for i in filled] for name in tables}
        columns |= {axis: [grid[i][k] for i in filled] for k, axis in enumerate(axes)}
    lengths = [len(one) for one in columns.values() if isinstance(one, (list, tuple))]
    count = max(lengths, default=1)
    columns |= {name: [one] * count for name, one in columns.items() if isinstance(one, Real)}
    if SPREAD in values:
        columns.setdefault(SPREAD, [None] * count)
    return {**fields, **columns}


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], list)


def _joined(name: str, lines: list[Any], varying: Mapping[str, list[Any]]) -> list[Any]:
    """A table's lines in one list. Their number is checked before any axis is spread."""
    *outer, length = [len(place) for place in varying.values()] or [1]
    if [len(line) if isinstance(line, list) else 0 for line in lines] != [length] * prod(outer):
        each = f", one for each {' and '.join(list(varying)[:-1])}," if outer else ""
        raise ValueError(f"{name} must have {prod(outer)} lines{each} of {length} numbers")
    return list(chain.from_iterable(lines))
