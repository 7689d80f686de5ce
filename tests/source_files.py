"""The repository as its own tests read it: Python files, parsed once, and the commands."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click

from profiler.cli import cli

ROOT = Path(__file__).parents[1]
PACKAGES = ("costmodel", "decoder", "integrations", "lab", "profiler", "rooftree")


@cache
def sources() -> dict[Path, str]:
    """The text of every Python file by its path from the root."""
    return {
        path.relative_to(ROOT): path.read_text(encoding="utf-8")
        for folder in (*PACKAGES, "examples", "tests")
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def below(*folders: str) -> list[Path]:
    """The paths of the Python files in these folders."""
    return [path for path in sources() if any(path.is_relative_to(one) for one in folders)]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(sources()[path])


@cache
def imports(path: Path) -> tuple[tuple[str, str], ...]:
    """Module and name (or nothing) of each import, in functions and for type checkers too."""
    found: list[tuple[str, str]] = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            found += [(str(node.module), alias.name) for alias in node.names]
    return tuple(found)


def commands(command: click.Command = cli, words: str = "") -> Iterator[tuple[str, click.Command]]:
    """A command and all below it, with their words."""
    yield words, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for word in command.list_commands(context):
            one = command.get_command(context, word)
            assert one is not None
            yield from commands(one, f"{words} {word}".strip())
