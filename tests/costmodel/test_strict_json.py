"""JSON of others: what Python's reader takes and nothing here can use is refused in one line."""

import ast
import json
from pathlib import Path

import pytest

from costmodel.errors import InputError, ProfileError
from costmodel.strict_json import NotJson, json_lines, parse_json, read_json

ODD = {
    "NaN": "not finite",
    "[1, -Infinity]": "not finite",
    "1e999": "not finite",
    '{"a": 1, "a": 2}': "'a' appears twice",
    '{"a": [{"b": 1, "c": 0, "b": 2}]}': "'b' appears twice",
    '"\\ud800"': "surrogate",
    '{"\\udfff": 1}': "surrogate",
    str(2**63): "64 bits",
    str(-(2**70)): "64 bits",
    "1" + "0" * 5000: "too many digits",
    "[" * 100_000: "too deeply",
    "[" * 60 + "]" * 60: "too deeply",
    '{"a":' * 60 + "1" + "}" * 60: "too deeply",
    "{'a': 1}": "in line 1",
    "[1,\n2": "in line 2",
    "": "line 1",
    b"\xff[]": "UTF-8",
}


@pytest.mark.parametrize("text", ODD, ids=range(len(ODD)))
def test_what_nothing_can_use_is_refused(text):
    with pytest.raises(NotJson, match=ODD[text]) as caught:
        parse_json(text)
    assert len(str(caught.value)) < 200


def test_sound_texts_are_read_as_python_does():
    value = {"a": [1, -2.5e-300, None, True, "\u00e9\U0001f600"], "b": {"c": {}}, "": 2**63 - 1}
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False).encode()):
        assert parse_json(text) == value
    assert parse_json(b"\xef\xbb\xbf[1]") == [1]  # with a byte order mark
    assert parse_json("[" * 30 + "]" * 30) == json.loads("[" * 30 + "]" * 30)
    assert parse_json("[Infinity]", finite=False) == [float("inf")]


def test_files_are_named(tmp_path):
    place = tmp_path / "a.json"
    place.write_text('{"a": NaN}')
    with pytest.raises(InputError, match=r"a\.json cannot be read as JSON: .* not finite"):
        read_json(place)
    with pytest.raises(ProfileError, match=r"none\.json: there is no such file"):
        read_json(tmp_path / "none.json", ProfileError)


def test_lines_are_numbered(tmp_path):
    lines = b'\xef\xbb\xbf{"a": "x\xe2\x80\xa8y"}\r\n\n[1, 2]\n'
    assert list(json_lines(tmp_path, lines)) == [(1, {"a": "x\u2028y"}), (3, [1, 2])]
    with pytest.raises(InputError, match=r"file, line 3 cannot be read as JSON: .*surrogate"):
        list(json_lines(tmp_path / "file", b'1\n2\n"\\ud83d"\n'))
    with pytest.raises(InputError, match=r"file is not UTF-8 text \(byte 2\)"):
        list(json_lines(tmp_path / "file", b"1\n\xff"))


def test_no_other_module_reads_json_of_others():
    """The rest reads what a process of its own wrote."""
    root, readers = Path(__file__).parents[2], set()
    for package in ("costmodel", "decoder", "integrations", "profiler", "rooftree"):
        for path in (root / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                    "json.load",
                    "json.loads",
                ):
                    readers.add(path.relative_to(root).as_posix())
    engines = {f"lab/bench/engines/{name}.py" for name in ("environment", "process", "worker")}
    assert readers - engines == {"costmodel/strict_json.py", "profiler/measure/journal.py"}
