"""Tables and JSON as commands print them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.report.console import print_json, table_lines


class TestJson:
    def test_one_object_with_its_version_and_sorted_keys(self, capsys):
        print_json({"b": 1, "a": [1.5, None]})
        captured = capsys.readouterr()
        assert captured.out.index('"a"') < captured.out.index('"b"')
        assert json.loads(captured.out) == {"a": [1.5, None], "b": 1, "schema_version": 1}
        print_json({"text": "a\nb"}, one_line=True)
        assert capsys.readouterr().out == '{"schema_version": 1, "text": "a\\nb"}\n'

    def test_numbers_that_json_lacks_are_null(self, capsys):
        print_json({"a": float("nan"), "b": (1.0, float("inf")), "c": {"d": [float("-inf")]}})
        shown = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
        assert shown == {"a": None, "b": [1.0, None], "c": {"d": [None]}, "schema_version": 1}


class TestTable:
    def test_control_characters_do_not_reach_the_terminal(self):
        lines = table_lines(("a", "b"), [("\x1b[2Jx\ny", "\u202etxt")], 80)
        assert lines[2] == r"\x1b[2Jx\ny  \u202etxt"

    @given(
        rows=st.lists(
            st.tuples(*(st.text("abc019/. ", min_size=1, max_size=40) for _ in range(5))),
            max_size=4,
        ),
        width=st.integers(20, 200),
        keys=st.integers(1, 3),
    )
    def test_no_width_cuts_a_cell(self, rows, width, keys):
        names = ("name", "two words", "x", "a much longer heading", "last")
        lines = table_lines(names, rows, width, keys=keys)
        widest = max([len(cell) for row in rows for cell in row] + [len("heading")])
        assert all(len(line) <= max(width, widest + 2) for line in lines)
        shown = "\n".join(f"{line}  " for line in lines)
        assert all(f"{cell.rstrip()} " in shown for row in rows for cell in row)
