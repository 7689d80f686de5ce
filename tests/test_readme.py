"""The README cannot rot: its commands parse, its options exist, its numbers are stored ones."""

import re
import shlex
from pathlib import Path

import click
import pytest

from benchmarks.readme import BLOCK, PAGES, with_numbers
from decoder.drafters.factory import DEMO, JOINT, KINDS, NAMED
from profiler.cli import COMMANDS, cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
LINKED_FROM_PAGES = {"simulated-acceptance.md"}  # from another page, not from the README
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
    while isinstance(command, click.Group) and not words[0].startswith("-"):
        command = command.get_command(context, words[0])
        assert command is not None
        words = words[1:]
    command.make_context(command.name, words, resilient_parsing=False)


def test_every_command_is_mentioned():
    for name in COMMANDS:
        assert f"rooftree {name}" in README, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_numbers_are_those_of_the_stored_results(page):
    text = page.read_text(encoding="utf-8")
    assert BLOCK.search(text)
    assert with_numbers(text) == text


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_linked_files_exist(name):
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / name).read_text(encoding="utf-8")):
        if "://" not in target:
            assert (ROOT / target).exists(), target


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_every_page_of_the_documentation_is_linked(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        if page.name not in LINKED_FROM_PAGES:
            assert f"(docs/{page.name})" in text, page.name


@pytest.mark.parametrize("command", ["generate", "calibrate"])
def test_help_readme_and_table_name_the_same_drafters(command):
    context = click.Context(cli, info_name="rooftree")
    [drafter] = [
        option for option in cli.get_command(context, command).params if option.name == "drafter"
    ]
    table = (ROOT / "docs" / "decoding.md").read_text(encoding="utf-8").split("## Policies")[0]
    assert drafter.default == "ngram"
    for name in (*NAMED, DEMO, "@block=N"):
        for text in (drafter.help, README, table):
            assert name in text, name
    assert f"A{JOINT}B" in drafter.help
    for text in (README, table):
        assert f"ngram{JOINT}{DEMO}" in text
    kinds = ("DFlash", "EAGLE-3", "SpecBlock", "BlockPilot")
    assert {word for kind in KINDS for word in kinds if word in kind.label} == set(kinds)
    for kind in kinds:
        assert kind in README and kind in table
        if command == "generate":
            assert kind in drafter.help


def test_the_python_example_uses_what_exists():
    blocks = [block for language, block in BLOCKS if language == "python"]
    assert blocks
    for block in blocks:
        compile(block, "README.md", "exec")
    from decoder import TreeDecoder

    assert {"from_pretrained", "generate", "stream"} <= set(dir(TreeDecoder))
