"""Parsing of YAML that others may have written: plain values, in bounded time and memory.

Only what profiles and the shipped data need is read: null, true and false, decimal numbers,
texts, lists and mappings. Aliases, merge keys, tags of other types and repeated keys are
errors; sexagesimal and hexadecimal numbers and dates stay texts.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import yaml

from costmodel.errors import ProfileError, RooftreeError

# libyaml recurses without a limit and crashes the process above some 20,000 levels.
MAX_YAML_OPENERS = 5_000
_OPENERS = ("[", "{", "- ", "? ", ": ")
MAX_LEVELS = 40  # of what is read; a profile has five
# Each takes about 1 kB and 5 us; a profile of a thousand points has some 7,000.
MAX_YAML_VALUES = 30_000
_SEPARATORS = (",", "\n")

# PyYAML's own errors, and those of its constructors for values that do not fit their tag.
_PARSE_FAILURES = (
    yaml.YAMLError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RecursionError,
)

_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,18})$")
_FLOAT = re.compile(r"[-+]?(?:[0-9]{1,40}\.[0-9]{0,40}(?:[eE][-+][0-9]{1,4})?|\.(?:inf|Inf|INF))$")
_NAN = re.compile(r"\.(?:nan|NaN|NAN)$")
_BOOLEANS = {
    "true": True,
    "True": True,
    "TRUE": True,
    "false": False,
    "False": False,
    "FALSE": False,
}
_NULLS = ("", "~", "null", "Null", "NULL")

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _resolvers() -> dict[str | None, list[tuple[str, re.Pattern[str]]]]:
    """The types of plain scalars, by their first character."""
    digits, signs = "0123456789", "-+"
    table: dict[str | None, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, pattern, firsts in (
        ("bool", re.compile(f"(?:{'|'.join(_BOOLEANS)})$"), "tTfF"),
        ("null", re.compile("(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
        ("int", _INT, digits + signs),
        ("float", _FLOAT, digits + signs + "."),
        ("float", _NAN, "."),
    ):
        for first in firsts:
            table.setdefault(first, []).append((_TAG + tag, pattern))
    return table


class _PlainLoader(_Loader):  # type: ignore[misc]
    """Reads plain values only, and each key of a mapping once."""

    yaml_implicit_resolvers = _resolvers()
    yaml_constructors: ClassVar[dict[str | None, Any]] = {}

    def flatten_mapping(self, node: Any) -> None:
        """Merge keys are not read."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _problem("a key is not a text", key_node)
            if key_node.value in seen:
                raise _problem(f"the key '{key_node.value}' appears twice", key_node)
            seen.add(key_node.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return mapping


def _problem(problem: str, node: Any) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _int(loader: Any, node: Any) -> int:
    text = loader.construct_scalar(node)
    if not _INT.match(text):
        raise _problem("a value does not fit its tag", node)
    return int(text)


def _float(loader: Any, node: Any) -> float:
    text = loader.construct_scalar(node)
    if not (_FLOAT.match(text) or _NAN.match(text) or _INT.match(text)):
        raise _problem("a value does not fit its tag", node)
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


def _bool(loader: Any, node: Any) -> bool:
    return _BOOLEANS[loader.construct_scalar(node)]


def _null(loader: Any, node: Any) -> None:
    if loader.construct_scalar(node) not in _NULLS:
        raise _problem("a value does not fit its tag", node)


def _unknown(loader: Any, node: Any) -> None:
    raise _problem("a value does not fit its tag", node)


for _tag, _construct in (
    ("int", _int),
    ("float", _float),
    ("bool", _bool),
    ("null", _null),
    ("str", _Loader.construct_yaml_str),
    ("seq", _Loader.construct_yaml_seq),
    ("map", _Loader.construct_yaml_map),
):
    _PlainLoader.add_constructor(_TAG + _tag, _construct)
_PlainLoader.add_constructor(None, _unknown)


def parse_yaml(raw: bytes, label: str, error: type[RooftreeError] = ProfileError) -> Any:
    """Parse YAML bytes into plain values; nothing in them is executed.

    Raises `error`, one line that names `label` as the origin, for bytes that are not UTF-8, not
    YAML, use what is not read, or hold too many entries.
    """
    hint = "Restore the file"
    if error is ProfileError:
        hint += ", or measure again with `rooftree calibrate`"
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as failure:
        raise error(f"{label}: not UTF-8 text (byte {failure.start})", hint=hint) from None
    levels = sum(text.count(mark) for mark in _OPENERS)
    values = sum(text.count(mark) for mark in _SEPARATORS)
    if levels > MAX_YAML_OPENERS or values > MAX_YAML_VALUES:
        raise error(f"{label}: not readable as YAML: too many or too deep entries", hint=hint)
    try:
        # Aliases need this character, and looking for it is a hundred times as fast as parsing.
        if "*" in text:
            _refuse_aliases(text)
        value = yaml.load(text, Loader=_PlainLoader)
        _check_levels(value)
        return value
    except _PARSE_FAILURES as failure:
        raise error(f"{label}: {_yaml_problem(failure)}", hint=hint) from None


def _refuse_aliases(text: str) -> None:
    for event in yaml.parse(text, Loader=_PlainLoader):
        if isinstance(event, yaml.AliasEvent):
            raise _problem("aliases are not read", event)


def _check_levels(value: Any) -> None:
    """Raise RecursionError for a value of more levels than what shows or checks it can take."""
    level = [value]
    for _ in range(MAX_LEVELS):
        nested = [x for x in level if isinstance(x, (list, dict))]
        level = [y for x in nested for y in (x.values() if isinstance(x, dict) else x)]
        if not level:
            return
    raise RecursionError


def _yaml_problem(failure: Exception) -> str:
    if isinstance(failure, RecursionError):
        return "not readable as YAML: nested too deeply"
    mark = getattr(failure, "problem_mark", None)
    where = f" at line {mark.line + 1}" if mark is not None else ""
    problem = str(getattr(failure, "problem", None) or failure)
    if not isinstance(failure, (yaml.YAMLError, ValueError, TypeError)):
        problem = "a value does not fit its tag"
    shown = "".join(c if c.isprintable() else "?" for c in " ".join(problem.split())[:200])
    return f"not readable as YAML{where}: {shown}"
