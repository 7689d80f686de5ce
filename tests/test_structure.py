"""The shape of the packages: no import circles, no crowded folders, one class a name."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import click

from profiler.cli import cli

ROOT = Path(__file__).parents[1]
PACKAGES = ("costmodel", "decoder", "integrations", "lab", "profiler", "rooftree")
MOST_FILES = 15
MOST_LINES = 500

# What the house may hold, so that whoever adds something says what it replaces: all lines of its
# Python files. The aims are a core of 175 files and 31,000 lines, integrations of 45 and 6,000, a
# lab of 12,000, studies of 6,000, tests of 30,000. Until then they only fall.
CORE = ("costmodel", "decoder", "profiler", "rooftree")
CORE_FILES, CORE_LINES = 178, 36_870
INTEGRATIONS_FILES, INTEGRATIONS_LINES = 44, 5_540
LAB_FILES, LAB_LINES = 90, 12_000  # without its studies
STUDIES, STUDIES_LINES = 24, 6_400  # those that can be run
TEST_LINES = 33_600
DOCS_WORDS = 20_000
OPTIONS = 122


@cache
def modules() -> dict[str, Path]:
    """Every module of the packages by its dotted name."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if (ROOT / "lab" / "studies") not in path.parents
    }


@cache
def parsed(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text(encoding="utf-8"))


def imported(tree: ast.Module, name: str, names: Mapping[str, Path]) -> set[str]:
    """The modules among `names` that a module imports, in functions and for type checkers too.

    A module that is inside a package imports that package as well; that is not counted.
    """
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} has a relative import"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in names else str(node.module))
    return (found & names.keys()) - {name}


def test_no_import_circles() -> None:
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from package import b\n"
    names = {"package.a": Path(), "package.b": Path()}
    assert imported(ast.parse(source), "package.a", names) == {"package.b"}
    graph = {name: imported(parsed(name), name, modules()) for name in modules()}
    TopologicalSorter(graph).prepare()  # raises a CycleError that names a circle


def test_no_crowded_folder():
    counts: dict[str, int] = defaultdict(int)
    for path in modules().values():
        counts[str(path.parent.relative_to(ROOT))] += 1
    assert {folder: count for folder, count in counts.items() if count > MOST_FILES} == {}


def test_no_long_module():
    lengths = {
        name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in modules().items()
    }
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def classes(tree: ast.Module) -> Iterator[str]:
    """Names of classes that other modules can see."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


def test_no_class_name_twice():
    homes: dict[str, list[str]] = defaultdict(list)
    for name in modules():
        for class_name in classes(parsed(name)):
            homes[class_name].append(name)
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def test_no_file_names_that_differ_by_an_ending():
    """Such as `plan.py` beside `planner.py` and `planning.py`, or `request` beside `requests`."""
    endings = ("s", "er", "ner", "ing", "ning", "_")
    folders: dict[Path, set[str]] = defaultdict(set)
    for path in modules().values():
        folders[path.parent].add(path.stem)
    for folder, stems in folders.items():
        twins = [(stem, end) for stem in stems for end in endings if stem + end in stems]
        assert twins == [], folder


def test_first_lines_say_what_a_module_is():
    first_words = {
        name: (ast.get_docstring(parsed(name)) or "none").split()[0] for name in modules()
    }
    questions = ("What", "How", "Which", "Where", "When", "Why", "none")
    assert {name: word for name, word in first_words.items() if word in questions} == {}


def lengths(*folders: str, without: str = "-") -> list[int]:
    """Lines of each Python file below the folders."""
    return [
        len(path.read_text(encoding="utf-8").splitlines())
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not path.is_relative_to(ROOT / without)
    ]


def test_the_core_is_one_that_a_person_can_hold():
    lines = lengths(*CORE)
    assert len(lines) <= CORE_FILES
    assert sum(lines) <= CORE_LINES
    outside = lengths("integrations")
    assert len(outside) <= INTEGRATIONS_FILES
    assert sum(outside) <= INTEGRATIONS_LINES


def test_the_lab_stays_smaller_than_the_core():
    lines, studies = lengths("lab", without="lab/studies"), lengths("lab/studies")
    assert len(lines) <= LAB_FILES
    assert sum(lines) <= LAB_LINES
    scripts = [
        path
        for path in (ROOT / "lab/studies").glob("*.py")
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    ]
    assert len(scripts) <= STUDIES
    assert sum(studies) <= STUDIES_LINES


def test_tests_and_pages_have_a_budget_too():
    assert sum(lengths("tests")) <= TEST_LINES
    pages = sorted((ROOT / "docs").rglob("*.md"))
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= DOCS_WORDS


def test_a_command_line_that_can_be_remembered():
    """Options of all commands, the lab's too."""

    def options(command, context):
        count = sum(isinstance(parameter, click.Option) for parameter in command.params)
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                subcommand = command.get_command(context, name)
                assert subcommand is not None
                count += options(subcommand, context)
        return count

    assert options(cli, click.Context(cli)) <= OPTIONS
