"""The README cannot rot: its commands parse, its options exist, its numbers are stored ones."""

import re
import shlex
from pathlib import Path

import click
import pytest

from benchmarks.readme import with_numbers
from profiler.cli import COMMANDS, cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMAND_LINES = [
    line
    for language, block in BLOCKS
    if language in ("", "sh", "console")
    for line in block.splitlines()
    if line.startswith(("rooftree ", "make "))
]


def test_there_are_commands_to_check():
    assert any(line.split("#")[0].strip() == "make calibrate" for line in COMMAND_LINES)
    assert any(line.split("#")[0].strip() == "make test" for line in COMMAND_LINES)
    assert sum(line.startswith("rooftree ") for line in COMMAND_LINES) >= 5


@pytest.mark.parametrize("line", [line for line in COMMAND_LINES if line.startswith("make ")])
def test_make_targets_exist(line):
    targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert line.split("#")[0].split()[1] in targets


@pytest.mark.parametrize("line", [line for line in COMMAND_LINES if line.startswith("rooftree ")])
def test_command_lines_parse(line):
    words = shlex.split(line, comments=True)[1:]
    context = click.Context(cli, info_name="rooftree")
    command = cli.get_command(context, words[0])
    assert command is not None
    words = words[1:]
    while isinstance(command, click.Group):
        command = command.get_command(context, words[0])
        assert command is not None
        words = words[1:]
    command.make_context(command.name, words, resilient_parsing=False)


def test_every_command_is_mentioned():
    for name in COMMANDS:
        assert f"rooftree {name}" in README, name


def test_numbers_are_those_of_the_stored_results():
    assert with_numbers(README) == README


def test_linked_files_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if "://" not in target:
            assert (ROOT / target).exists(), target


def test_the_python_example_uses_what_exists():
    blocks = [block for language, block in BLOCKS if language == "python"]
    assert blocks
    for block in blocks:
        compile(block, "README.md", "exec")
    from decoder import TreeDecoder

    assert {"from_pretrained", "generate", "stream"} <= set(dir(TreeDecoder))
