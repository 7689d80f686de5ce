"""The README and docs/usage.md cannot rot: commands parse and run."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml

from profiler.cli import COMMANDS, cli
from tests.conftest import CALIBRATED

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
USAGE = (ROOT / "docs" / "usage.md").read_text(encoding="utf-8")


def code_blocks(text: str) -> list[tuple[str, str]]:
    """The language and the text of each code block."""
    return re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def command_lines(text: str) -> list[str]:
    """The commands of a page, in blocks and within sentences and tables, without comments."""
    shown = [
        line.split("#")[0].strip()
        for language, block in code_blocks(text)
        if language in ("", "sh", "console")
        for line in block.splitlines()
    ]
    within = re.findall(r"`(rooftree [^`]+)`", text)
    return [line for line in dict.fromkeys([*shown, *within]) if "COMMAND" not in line]


README_LINES, USAGE_LINES = command_lines(README), command_lines(USAGE)
ROOFTREE_LINES = [
    line for line in dict.fromkeys([*README_LINES, *USAGE_LINES]) if line.startswith("rooftree ")
]


def test_there_are_commands_to_check():
    wanted = {"make calibrate", "make test", "rooftree calibrate", "pip install '.[demo]'"}
    assert wanted <= {*README_LINES}
    assert sum(line.startswith("rooftree ") for line in README_LINES) >= 5
    targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    made = {line.split()[1] for line in README_LINES if line.startswith("make ")}
    assert made <= set(targets)
    for name in COMMANDS:
        assert f"rooftree {name}" in USAGE, name


@pytest.mark.parametrize("line", ROOFTREE_LINES)
def test_command_lines_parse(line, tmp_path, monkeypatch):
    (tmp_path / "my-model").mkdir()  # a target that the pages name
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line.partition(" | ")[0])[1:]
    context = click.Context(cli, info_name="rooftree")
    command = cli.get_command(context, words[0])
    assert command is not None
    words = [word for word in words[1:] if word != "--json"]  # an option of rooftree itself
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        command = command.get_command(context, words[0])
        assert command is not None
        words = words[1:]
    required = [param for param in command.params if param.required]
    if words or not required:  # a command alone, in a table, is its name
        command.make_context(command.name, words, resilient_parsing=False)


@pytest.mark.slow
@pytest.mark.parametrize("line", [
    # The names of commands in sentences are no calls.
    one for one in README_LINES
    if one.startswith("rooftree ") and one not in ("rooftree bench", "rooftree train-drafter")
])  # fmt: skip
def test_the_readmes_commands_run(line, tmp_path, smollm2_folder):
    command = [sys.executable, "-m", "rooftree", *shlex.split(line)[1:]]
    (tmp_path / "models").symlink_to(smollm2_folder.parent)
    environment = os.environ | {"ROOFTREE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    ends = CALIBRATED if line == "rooftree calibrate" else (0,)
    assert done.returncode in ends, done.stderr[-2000:]
    assert "Traceback" not in done.stderr


def test_every_page_of_the_documentation_is_in_the_navigation():
    class Loader(yaml.SafeLoader):
        """Reads mkdocs.yml, whose tags name Python functions."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    navigation = str(yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"])
    for page in (ROOT / "docs").rglob("*.md"):
        assert str(page.relative_to(ROOT / "docs")) in navigation, page.name


@pytest.mark.parametrize("text", [README, USAGE], ids=["README", "usage"])
def test_the_python_examples_use_what_exists(text):
    blocks = [block for language, block in code_blocks(text) if language == "python"]
    assert blocks
    for block in blocks:
        compile(block, "page", "exec")
