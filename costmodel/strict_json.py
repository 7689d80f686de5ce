"""JSON that others wrote: bounded in size and depth, finite, no key twice, Unicode text only.

Python's own reader takes NaN, numbers of thousands of digits, halves of surrogate pairs, keys
that occur twice, and as many levels as the stack holds. Each of them fails later, far from the
file that is to blame.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from costmodel.errors import InputError, RooftreeError
from costmodel.io import read_bytes

MOST_BYTES = 256_000_000  # a bench result of many prompts takes some 10 MB
MOST_LEVELS = 40
LARGEST_INTEGER = 2**63 - 1


class NotJson(ValueError):
    """Text that is not JSON as this project reads it; the message says why in a few words."""


def read_json(
    path: Path, error: type[RooftreeError] = InputError, *, hint: str = "", finite: bool = True
) -> Any:
    """The JSON value in a file; `finite` refuses NaN and infinity, which JSON does not have.

    Raises `error` naming the file where it cannot be read or is not JSON.
    """
    raw = read_bytes(path, error, most_bytes=MOST_BYTES)
    try:
        return parse_json(raw, finite=finite)
    except NotJson as failure:
        raise error(
            f"{path} cannot be read as JSON: {failure}", hint=hint or "Restore the file."
        ) from None


def json_lines(
    path: Path, raw: bytes, error: type[RooftreeError] = InputError, *, hint: str = ""
) -> Iterator[tuple[int, Any]]:
    """The number, from 1, and the JSON value of each line of a file that is not blank.

    raw  the file's content
    Raises `error` naming the file and the line that is not JSON.
    """
    try:
        text = raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as failure:
        raise error(f"{path} is not UTF-8 text (byte {failure.start})", hint=hint) from None
    for number, line in enumerate(text.split("\n"), 1):  # texts may hold other line separators
        if line.strip():
            try:
                yield number, parse_json(line)
            except NotJson as failure:
                raise error(
                    f"{path}, line {number} cannot be read as JSON: {failure}", hint=hint
                ) from None


def parse_json(raw: bytes | str, *, finite: bool = True) -> Any:
    """The value of a JSON text, in plain Python types. Raises NotJson."""
    try:
        text = raw.decode("utf-8") if isinstance(raw, bytes) else raw
        value = json.loads(text.removeprefix("\ufeff"), object_pairs_hook=_mapping)
    except NotJson:
        raise
    except UnicodeDecodeError as failure:
        raise NotJson(f"it is not UTF-8 text (byte {failure.start})") from None
    except RecursionError:
        raise NotJson("it is nested too deeply") from None
    except json.JSONDecodeError as failure:
        raise NotJson(f"{failure.msg} in line {failure.lineno}") from None
    except ValueError:  # Python's limit of digits
        raise NotJson("a number has too many digits") from None
    _check(value, finite)
    return value


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise NotJson(f"the key {twice[:80]!a} appears twice")
    return mapping


def _check(value: Any, finite: bool) -> None:
    """Raise NotJson for values that no reader here can use. Level by level, without recursion."""
    level = [value]
    for _ in range(MOST_LEVELS):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += item
                below += item.values()
            elif isinstance(item, list):
                below += item
            else:
                _check_plain(item, finite)
        if not below:
            return
        level = below
    raise NotJson("it is nested too deeply")


def _check_plain(value: Any, finite: bool) -> None:
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise NotJson("a text holds half of a surrogate pair")
    elif isinstance(value, float):
        if finite and not math.isfinite(value):
            raise NotJson("a number is not finite")
    elif isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        raise NotJson("a whole number has more than 64 bits")
