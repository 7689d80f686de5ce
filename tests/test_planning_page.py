"""docs/planning.md cannot rot: its output is that of its commands."""

from benchmarks.planning_page import BLOCK, PAGE, with_output


def test_output_is_what_the_commands_print():
    text = PAGE.read_text(encoding="utf-8")
    assert len(BLOCK.findall(text)) >= 4
    assert with_output(text) == text
