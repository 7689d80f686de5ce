"""Text of a profile: YAML with flow lists and six significant digits, and one-line errors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import yaml

from costmodel import errors

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
