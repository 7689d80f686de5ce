"""Changes of a profile's data in their structure and numbers, and of its text."""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import yaml

from costmodel.architecture import ModelArchitecture
from costmodel.errors import RooftreeError
from costmodel.profile.text import dump_yaml

Data = dict[str, Any]
Place = tuple[Any, ...]


def places(value: Any, path: Place = ()) -> Iterator[Place]:
    """The path of every value below the top."""
    pairs = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        pairs = enumerate(value)
    for key, inner in pairs:
        yield (*path, key)
        yield from places(inner, (*path, key))


def at(data: Any, path: Place) -> Any:
    for key in path:
        data = data[key]
    return data


def _fields(data: Data, draw: random.Random, want: Callable[[Any], bool]) -> tuple[Any, Any]:
    """(container, key) of a random field that `want` accepts; each list counts once."""
    fields = [p for p in places(data) if not isinstance(p[-1], int) and want(at(data, p))]
    path = draw.choice(fields)
    return at(data, path[:-1]), path[-1]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and _is_number(value[0])


EXTREME: tuple[Any, ...] = (
    0, 0.0, -1, -1.0, 1, 1.0, 2, 0.5, 1.5, 1e-320, 1e-300, 1e-30, 1e-12, 1e-9, 1.1e-8, 1e-7, 1e-6,
    1e-4, 1e3, 1e4, 9.9e4, 1e6, 1e9, 1e15, 1e18, 1e21, 1e30, 1e195, 1e300, 10**6, 10**9, 10**12,
    2**31, 2**53, 2**63 - 1, 10**18, math.nan, math.inf, -math.inf, True, None, "12", "x", [], {},
    [1], {"a": 1},
)  # fmt: skip
WORDS = (
    "", "x" * 501, "x" * 100_000, "\x1b[31mred", "\u202e\u2028", "null", "1:0:0", "0x10", "<<",
    "\ud7ff", "~", "a: b", "- a", "\U0001f600" * 300, "measured", "quick", "composed", "eager",
    "graphs", "kernels", "cpu", "cuda", "float32", "linear", "physical", "stairs", "surface",
    "log", "work", "exact", "line", "mean", "2026-03-01T12:00:00Z",
)  # fmt: skip


def extreme_number(data: Data, draw: random.Random) -> None:
    section, key = _fields(data, draw, _is_number)
    section[key] = draw.choice(EXTREME)


def scaled_number(data: Data, draw: random.Random) -> None:
    section, key = _fields(data, draw, _is_number)
    section[key] = type(section[key])(section[key] * 10 ** draw.uniform(-9, 9))


def extreme_entry(data: Data, draw: random.Random) -> None:
    section, key = _fields(data, draw, _is_numbers)
    section[key][draw.randrange(len(section[key]))] = draw.choice(EXTREME)


def scaled_entry(data: Data, draw: random.Random) -> None:
    section, key = _fields(data, draw, _is_numbers)
    index = draw.randrange(len(section[key]))
    section[key][index] = type(section[key][index])(section[key][index] * 10 ** draw.uniform(-7, 7))


def scaled_list(data: Data, draw: random.Random) -> None:
    """All entries by one factor: lengths and order stay."""
    section, key = _fields(data, draw, _is_numbers)
    factor = 10 ** draw.uniform(-6, 6)
    section[key] = [None if x is None else type(x)(x * factor) for x in section[key]]


def jittered_times(data: Data, draw: random.Random) -> None:
    """Times over many orders of magnitude, with spreads that fit."""
    sections = [p for p in places(data) if p[-1] == "median_s"]
    section, orders = at(data, draw.choice(sections)[:-1]), draw.choice((0.1, 1, 3, 6))
    section["median_s"] = [
        min(max(x * 10 ** draw.uniform(-orders, orders), 1e-8), 1e5) for x in section["median_s"]
    ]
    section["mad_s"] = [draw.choice((None, 0.0, x / 2, x)) for x in section["median_s"]]


def stretched_axis(data: Data, draw: random.Random) -> None:
    """An axis of whole numbers moved apart, ascending as before."""
    axes = [p for p in places(data) if p[-1] in ("rows", "context", "batch", "nodes", "tokens")]
    path = draw.choice([p for p in axes if isinstance(at(data, p), list)])
    factor, added = draw.choice((2, 1000, 10**6)), draw.choice((0, 1, 10**6))
    at(data, path[:-1])[path[-1]] = [x * factor + added for x in at(data, path)]


def fewer_points(data: Data, draw: random.Random) -> None:
    """The same part of every list of a section."""
    sections = [p[:-1] for p in places(data) if p[-1] == "n" and isinstance(at(data, p), list)]
    section = at(data, draw.choice(sections))
    count = len(section["n"])
    kept = sorted(draw.sample(range(count), draw.choice((0, 1, 2, 4, 6, count // 2))))
    for key, value in section.items():
        if isinstance(value, list):
            section[key] = [value[index] for index in kept]


def more_points(data: Data, draw: random.Random) -> None:
    """A section's lists many times over, its first axis moved on."""
    sections = [p[:-1] for p in places(data) if p[-1] == "n" and isinstance(at(data, p), list)]
    section, times = at(data, draw.choice(sections)), draw.choice((2, 5, 13, 200))
    first = "batch" if "batch" in section else next(iter(section))
    last = max(section[first])
    for key, value in section.items():
        if isinstance(value, list):
            moved = last if key == first else 0
            section[key] = [x + moved * i if moved else x for i in range(times) for x in value]


def another_word(data: Data, draw: random.Random) -> None:
    section, key = _fields(data, draw, lambda value: isinstance(value, str))
    section[key] = draw.choice(WORDS)


def another_calibration(data: Data, draw: random.Random) -> None:
    names = ("linear", "two_branch", "physical", "surface", "stairs")
    data["calibration"]["selected"] = draw.choice(names)


def other_options(data: Data, draw: random.Random) -> None:
    data["calibration"]["surface"] = {
        "rows": draw.choice(("work", "log")), "context": draw.choice(("exact", "line", "mean")),
    }  # fmt: skip


def other_coefficients(data: Data, draw: random.Random) -> None:
    """Coefficients of one calibration at random, from nothing to far too much."""
    names = [n for n in ("linear", "two_branch", "physical", "stairs") if n in data["calibration"]]
    section = data["calibration"][draw.choice(names)]
    for key, value in section.items():
        if _is_number(value) and draw.random() < 0.5:
            section[key] = type(value)(draw.choice((0, 1e-300, value, 10 ** draw.uniform(-8, 8))))


def other_sizes(data: Data, draw: random.Random) -> None:
    sizes = data["target"]["architecture"]
    key = draw.choice([key for key, value in sizes.items() if _is_number(value)])
    sizes[key] = draw.choice((0, 1, 2, 8, sizes[key] * 2, 10**4, 10**6, 10**9, 10**30))


def missing_field(data: Data, draw: random.Random) -> None:
    section, key = _fields(data, draw, lambda value: True)
    del section[key]


def renamed_field(data: Data, draw: random.Random) -> None:
    section, key = _fields(data, draw, lambda value: True)
    section[draw.choice((key + "x", "x" * 5000, "\x1b[2J", "", "<<", "*a", 1))] = section.pop(key)


def moved_field(data: Data, draw: random.Random) -> None:
    section, key = _fields(data, draw, lambda value: True)
    goal, _ = _fields(data, draw, lambda value: True)
    goal[key] = copy.deepcopy(section.pop(key))  # the goal may lie in what is moved


def emptied_field(data: Data, draw: random.Random) -> None:
    section, key = _fields(data, draw, lambda value: isinstance(value, (list, dict, str)))
    section[key] = type(section[key])()


def swapped_fields(data: Data, draw: random.Random) -> None:
    one, key = _fields(data, draw, lambda value: True)
    other, name = _fields(data, draw, lambda value: True)
    one[key], other[name] = copy.deepcopy(other[name]), copy.deepcopy(one[key])


STRUCTURE = (
    extreme_number, scaled_number, extreme_entry, scaled_entry, scaled_list, jittered_times,
    stretched_axis, fewer_points, more_points, another_word, another_calibration, other_options,
    other_coefficients, other_sizes, missing_field, renamed_field, moved_field, emptied_field,
    swapped_fields,
)  # fmt: skip


def rehash(data: Data) -> None:
    """Make the hash that of the sizes, so that changed sizes are looked at."""
    with contextlib.suppress(RooftreeError, KeyError, TypeError, AttributeError):
        sizes = ModelArchitecture.from_dict({"name": "x"} | data["target"]["architecture"])
        data["target"]["architecture_hash"] = sizes.hash


def flipped_bytes(raw: bytes, draw: random.Random) -> bytes:
    changed = bytearray(raw)
    for _ in range(draw.choice((1, 1, 3, 20))):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


def cut(raw: bytes, draw: random.Random) -> bytes:
    return raw[: draw.randrange(len(raw))]


def lost_line(raw: bytes, draw: random.Random) -> bytes:
    lines = raw.split(b"\n")
    del lines[draw.randrange(len(lines))]
    return b"\n".join(lines)


def repeated_line(raw: bytes, draw: random.Random) -> bytes:
    lines = raw.split(b"\n")
    lines.insert(draw.randrange(len(lines)), draw.choice(lines))
    return b"\n".join(lines)


def other_digits(raw: bytes, draw: random.Random) -> bytes:
    """A number written in another way."""
    words = raw.split(b" ")
    numbers = [i for i, word in enumerate(words) if word[:1].isdigit()]
    words[draw.choice(numbers)] = draw.choice(NUMBERS)
    return b" ".join(words)


def planted(raw: bytes, draw: random.Random) -> bytes:
    """A construct of YAML in place of a value, at the end of a line or of the file."""
    part, lines = draw.choice(CONSTRUCTS), raw.split(b"\n")
    where, index = draw.randrange(3), draw.randrange(len(lines))
    if where == 0:
        return raw + b"extra: " + part + b"\n"
    if where == 1:
        return part + b"\n" + raw
    lines[index] = lines[index].partition(b":")[0] + b": " + part
    return b"\n".join(lines)


def reframed(raw: bytes, draw: random.Random) -> bytes:
    """Other line ends, encodings and documents."""
    text = raw.decode("utf-8", "surrogatepass")
    return draw.choice(
        (
            b"\xef\xbb\xbf" + raw,
            raw.replace(b"\n", b"\r\n"),
            raw + b"---\n" + raw,
            raw + b"...\n",
            b"%YAML 1.2\n---\n" + raw,
            raw + b"\x00",
            raw.replace(b"  ", b"\t"),
            text.encode("utf-16", "surrogatepass"),
            raw.replace(b"\n", b"\xe2\x80\xa8"),
            b"",
            b"[]",
            b"#" * 10**6,
            b" " * 10**6 + raw,
        )
    )


TEXT = (flipped_bytes, cut, lost_line, repeated_line, other_digits, planted, planted, reframed)

NUMBERS = (
    b"1" + b":0" * 20_000, b"0x" + b"f" * 5_000, b"0b" + b"1" * 50_000, b"0" + b"7" * 20_000,
    b"9" * 5_000, b"1" + b"_0" * 5_000, b"1:59:59.5", b"1." + b"0" * 20_000, b"1.0e+" + b"9" * 999,
    b"2026-03-01", b"1e5", b"+1", b"-0", b"-0.0", b".5", b"5.", b"1_000", b"0o17", b"1.0e-320",
    b"!!int '1:0:0:0'", b"!!float 1e5", b"!!int 0x10", b"!!str 5", b"! 5",
)  # fmt: skip


def _bomb(merge: bool) -> bytes:
    """Mappings that hold the one before ten times, by aliases or merge keys."""
    lines = [b"a0: &a0 {x: 1, y: 2}"]
    for i in range(1, 30):
        inner = b", ".join([b"*a%d" % (i - 1)] * 10)
        held = b"{<<: [%s]}" % inner if merge else b"[%s]" % inner
        lines.append(b"a%d: &a%d %s" % (i, i, held))
    return b"\n" + b"\n".join(b"  " + line for line in lines)


CONSTRUCTS = (
    _bomb(merge=True), _bomb(merge=False), b"&a [*a]", b"&a {b: *a}", b"*nowhere", b"&a 1",
    b"{<<: {a: 1}}", b"{<<: [{a: 1}, {<<: {b: 2}}]}", b"{!!merge x: {a: 1}}", b"{=: 1}",
    b"[" + b"1, " * 1_000_000 + b"1]", b"[" * 3_000 + b"]" * 3_000,
    b"{a: " * 2_000 + b"}" * 2_000,
    b"\n" + b"-\n" * 1_000_000, b"[" + b"[], " * 4_000 + b"]",
    b"!!python/object/apply:os.getcwd []",
    b"!!set {1, 2}", b"!!omap [a: 1]", b"!!binary aGVsbG8=", b"!!timestamp 2026-03-01", b"!!null x",
    b"!!map [1]", b"!!seq {a: 1}", b"!!bool maybe", b"!<tag:example.com,2000:x> 1", b"? [1]\n: 2",
    b"{[1]: 2}", b"{{a: 1}: 2}", b"'" + b"x" * 100_000 + b"'", b'"\\e[2J\\x07\\u202e"',
    b"|\n  text",
    b"{1: 2, 1: 3}", b"{a: 1, a: 2}", b"{" + b"x" * 50_000 + b": 1}", b"{? }", b"@x", b"`x`",
)  # fmt: skip


@lru_cache(maxsize=16)
def _document(raw: bytes) -> Data:
    data: Data = yaml.load(raw, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return data


def mutated_profile(raw: bytes, draw: random.Random) -> bytes:
    """A sound profile with up to three changes of its structure, one of its text, or both."""
    data = copy.deepcopy(_document(raw))
    count = draw.choice((0, 1, 1, 1, 2, 3))
    for change in draw.choices(STRUCTURE, k=count):
        with contextlib.suppress(KeyError, IndexError, TypeError, ValueError, AttributeError):
            change(data, draw)  # an earlier change may have removed its object
    if draw.random() < 0.5:
        rehash(data)
    with contextlib.suppress(yaml.YAMLError, ValueError, TypeError):  # what no YAML can hold
        raw = dump_yaml(data).encode("utf-8", "surrogatepass")
    if not count or draw.random() < 0.25:
        raw = draw.choice(TEXT)(raw, draw)
    return raw
