"""Mutations of files: of values by their place in a document, of lines, of text and of bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any, Literal

import yaml

from lab.studies.faults.profile_changes import mutated_profile

Kind = Literal["json", "jsonl", "yaml", "csv", "text", "binary", "profile"]

# Values of wrong types, of wrong ranges, and such as break what comes after the reading.
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 8.5, -0.0, 0.1, 1e-12, 1e-300, 1e300, 1e308, 2**31, 2**53,
    2**63 - 1, 2**63, 2**70, 10**400, -(2**70), float("nan"), float("inf"), float("-inf"),
    "", " ", "0", "1", "nan", "x", "x" * 300, "y" * 5000, "\x00", "\x1b[31mred\x1b[0m", "\ud800",
    "\u202egnp.exe", "e\u0301\U0001f600", "../../etc/passwd", "/dev/full", "~nosuchuser/x",
    "!!python/object/apply:os.system ['true']", "{{ 7 * 7 }}", "a\nb", [], {}, [[]], [None],
    [0], [1, 2], [1, "a"], [-1], [2**70], ["a"], {"a": 1}, {"": None},
)  # fmt: skip
DEEP = (50, 900, 20_000)  # levels
NUMBER_TEXTS = ("nan", "inf", "-1", "0", "1e999", "1e-320", "", "x", "0x10", "1:30:00", "1" * 5000)


def mutated(raw: bytes, kind: Kind, random: Random) -> bytes:
    """The file's bytes with one to three mutations."""
    if kind == "profile":
        return mutated_profile(raw, random)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        raw = _once(raw, kind, random)
    return raw


def _once(raw: bytes, kind: Kind, random: Random) -> bytes:
    if kind == "binary" or random.random() < 0.08:
        return _bytes(raw, random)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return _bytes(raw, random)
    if kind == "text" or random.random() < 0.12:
        return _encoded(_text(text, random))
    by_kind: dict[str, Callable[[str, Random], str]] = {
        "json": _json, "jsonl": _json_line, "yaml": _yaml, "csv": _table,
    }  # fmt: skip
    try:
        return _encoded(by_kind[kind](text, random))
    except (ValueError, TypeError, ArithmeticError, RecursionError, yaml.YAMLError, IndexError):
        return _encoded(_text(text, random))  # mutated beyond parsing before


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", errors="surrogatepass")


def _json(text: str, random: Random) -> str:
    if random.random() < 0.05:
        levels = random.choice(DEEP)
        return _spliced(text, "[" * levels + "]" * levels, random)
    if random.random() < 0.05:
        return _repeated_key(text, random)
    return json.dumps(_value(json.loads(text), random), ensure_ascii=random.random() < 0.7)


def _json_line(text: str, random: Random) -> str:
    lines = text.split("\n")
    place = random.randrange(len(lines))
    lines[place] = _json(lines[place], random)
    return "\n".join(lines)


def _yaml(text: str, random: Random) -> str:
    if random.random() < 0.1:
        return _number_text(text, random)
    data = _value(yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)), random)
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return str(yaml.dump(data, Dumper=dumper, allow_unicode=True, sort_keys=False))


def _table(text: str, random: Random) -> str:
    """A CSV table with a cell, a line or a column changed."""
    rows = [line.split(",") for line in text.split("\n")]
    row = random.choice(rows)
    place = random.randrange(len(row))
    match random.randrange(6):
        case 0 | 1 | 2:
            row[place] = random.choice(NUMBER_TEXTS)
        case 3:
            row[place] = str(random.choice(ODD))
        case 4:
            del row[place]
        case 5:
            for line in rows:
                del line[place : place + 1]
    return "\n".join(",".join(row) for row in rows)


def _value(value: Any, random: Random) -> Any:
    """A document with one value, key or entry changed at a random place."""
    places = list(_places(value))
    if not places or random.random() < 0.02:
        return random.choice(ODD)
    parent, key = random.choice(places)
    match random.randrange(10):
        case 0 | 1 | 2 | 3:
            parent[key] = random.choice(ODD)
        case 4 | 5:
            parent[key] = _nudged(parent[key], random)
        case 6:
            del parent[key]
        case 7:
            other, place = random.choice(places)
            parent[key] = _copied(other[place])
        case 8 if isinstance(parent, dict):
            parent[random.choice((str(key) + "x", "\x1b[2J", "", "__class__", "k" * 400))] = (
                parent.pop(key)
            )
        case 8 | 9:
            _stretch(parent, key, random)
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key or index) of every value in a document."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        item = waiting.pop()
        keys = list(item) if isinstance(item, dict) else range(len(item)) if _is_list(item) else ()
        for key in keys:
            found.append((item, key))
            waiting.append(item[key])
    return found


def _nudged(value: Any, random: Random) -> Any:
    """A value of the same type that is somewhat or far off."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, (int, float)):
        changed = (
            value + 1, value - 1, -value, 0 * value, 2 * value, value * 1000, value * 10**9,
            value * 1e-9, value + 0.5, str(value),
        )  # fmt: skip
        return random.choice(changed)
    if isinstance(value, str):
        return random.choice((value + "x", value[:-1], value.upper(), value * 40, [value]))
    if _is_list(value):
        return random.choice((value[:-1], value[1:], value * 2, value[::-1], [value]))
    return [value]


def _stretch(parent: Any, key: Any, random: Random) -> None:
    """Make a list longer or shuffle it, or give a mapping a key more."""
    if _is_list(parent):
        match random.randrange(3):
            case 0:
                parent.insert(key, _copied(parent[key]))
            case 1:
                random.shuffle(parent)
            case 2:
                parent.extend(parent[:50] * random.choice((1, 20)))
    else:
        parent[random.choice(("extra", "version", "1"))] = random.choice(ODD)


def _repeated_key(text: str, random: Random) -> str:
    data = json.loads(text)
    if not isinstance(data, dict) or not data:
        return text
    key = random.choice(list(data))
    return json.dumps(data)[:-1] + f", {json.dumps(key)}: {json.dumps(data[key])}}}"


def _number_text(text: str, random: Random) -> str:
    """A number of the text in a form that readers differ about."""
    words = text.split(" ")
    numbers = [place for place, word in enumerate(words) if word[:1].isdigit()]
    if numbers:
        words[random.choice(numbers)] = random.choice((*NUMBER_TEXTS, "&a 1", "*a", "<<", "? 1"))
    return " ".join(words)


def _text(text: str, random: Random) -> str:
    lines = text.split("\n")
    place = random.randrange(len(lines))
    match random.randrange(9):
        case 0:
            return text[: random.randrange(len(text) + 1)]
        case 1:
            del lines[place]
        case 2:
            lines.insert(place, lines[place])
        case 3:
            lines[place] += random.choice(("\x00", "\x1b[2J", "\r", "}", '"', "\ufeff", " #"))
        case 4:
            return "\ufeff" + text
        case 5:
            return text.replace("\n", "\r\n")
        case 6:
            return _spliced(text, random.choice(("{", "[", "'", '"', ":", "-", "%")), random)
        case 7:
            return _spliced(text, "z" * random.choice((300, 70_000, 200_000)), random)
        case 8:
            return random.choice(("", "\n", "null", "[]", "{}", "0", '"x"', "---", "[" * 5000))
    return "\n".join(lines)


def _spliced(text: str, part: str, random: Random) -> str:
    place = random.randrange(len(text) + 1)
    return text[:place] + part + text[place:]


def _bytes(raw: bytes, random: Random) -> bytes:
    if not raw:
        return random.randbytes(8)
    data = bytearray(raw)
    place = random.randrange(len(data))
    match random.randrange(6):
        case 0:
            return bytes(data[:place])
        case 1 | 2:
            data[place] ^= 1 << random.randrange(8)
        case 3:
            data[random.randrange(min(64, len(data)))] ^= 1 << random.randrange(8)
        case 4:
            size = random.choice((1, 8, 64))
            data[place : place + size] = random.choice((b"\x00", b"\xff")) * size
        case 5:
            data[place:place] = random.randbytes(random.choice((1, 8)))
    return bytes(data)


def _copied(value: Any) -> Any:
    return json.loads(json.dumps(value)) if isinstance(value, (dict, list)) else value


def _is_list(value: Any) -> bool:
    return isinstance(value, list)
