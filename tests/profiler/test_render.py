"""Tables and JSON as commands print them."""

from __future__ import annotations

import json

import pytest

from profiler.render import note, print_json, print_table


def test_json_is_stable_and_refuses_what_json_cannot_hold(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_json({"b": 1, "a": [1.5, None]})
    captured = capsys.readouterr()
    assert captured.out.index('"a"') < captured.out.index('"b"')
    assert json.loads(captured.out) == {"a": [1.5, None], "b": 1}
    with pytest.raises(ValueError):
        print_json(float("nan"))


def test_tables_align_numbers_and_do_not_break_lines(capsys: pytest.CaptureFixture[str]) -> None:
    long = "a/path/" * 20
    print_table(("rows", "ms", "path [x]"), [(1, "2.50", long), (1024, None, "[bold]b[/bold]")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["rows", "ms", "path", "[x]"]
    assert lines[2] == f"    1   2.50   {long}"
    assert lines[3] == " 1024      -   [bold]b[/bold]"


def test_notes_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    note("hello")
    assert capsys.readouterr() == ("", "hello\n")
