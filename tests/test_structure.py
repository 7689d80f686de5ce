"""The shape of the packages: no import circles, no crowded folders, one class a name."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import click

from tests.source_files import PACKAGES, ROOT, below, commands, imports, parsed, sources

MOST_FILES = 15
MOST_LINES = 500

# What the house may hold, so that whoever adds something says what it replaces: all lines of its
# Python files. The aims are a core of 175 files and 31,000 lines, integrations of 45 and 6,000, a
# lab of 12,000, studies of 6,000, tests of 30,000. Until then they only fall.
CORE = ("costmodel", "decoder", "profiler", "rooftree")
CORE_FILES, CORE_LINES = 165, 32_480
INTEGRATIONS_FILES, INTEGRATIONS_LINES = 44, 5_640
LAB_FILES, LAB_LINES = 82, 11_640  # without its studies
STUDIES, STUDIES_LINES = 20, 5_820  # those that can be run
TEST_LINES = 29_360
DOCS_WORDS = 19_400
OPTIONS = 119


MODULES = {
    ".".join(path.with_suffix("").parts).removesuffix(".__init__"): path
    for path in below(*PACKAGES)
    if not path.is_relative_to("lab/studies")
}


def test_no_import_circles() -> None:
    """A module inside a package imports that package as well; that is not counted."""
    graph = {
        name: {f"{module}.{one}" if f"{module}.{one}" in MODULES else module
               for module, one in imports(path)} & MODULES.keys() - {name}
        for name, path in MODULES.items()
    }  # fmt: skip
    assert sum(map(len, graph.values())) > 1000
    TopologicalSorter(graph).prepare()  # raises a CycleError that names a circle


def test_no_crowded_folder_and_no_long_module():
    counts = Counter(path.parent for path in MODULES.values())
    assert {folder: count for folder, count in counts.items() if count > MOST_FILES} == {}
    assert [path for path in MODULES.values() if lines_of(path) > MOST_LINES] == []


def test_no_class_name_twice():
    """Of classes that other modules can see."""
    homes: dict[str, list[str]] = defaultdict(list)
    for name, path in MODULES.items():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(name)
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def test_no_file_names_that_differ_by_an_ending():
    """Such as `plan.py` beside `planner.py` and `planning.py`, or `request` beside `requests`."""
    endings = ("s", "er", "ner", "ing", "ning", "_")
    folders: dict[Path, set[str]] = defaultdict(set)
    for path in MODULES.values():
        folders[path.parent].add(path.stem)
    for folder, stems in folders.items():
        twins = [(stem, end) for stem in stems for end in endings if stem + end in stems]
        assert twins == [], folder


def test_first_lines_say_what_a_module_is():
    first_words = {
        name: (ast.get_docstring(parsed(path)) or "none").split()[0]
        for name, path in MODULES.items()
    }
    questions = ("What", "How", "Which", "Where", "When", "Why", "none")
    assert {name: word for name, word in first_words.items() if word in questions} == {}


def lines_of(*paths: Path) -> int:
    return sum(len(sources()[path].splitlines()) for path in paths)


def test_the_core_is_one_that_a_person_can_hold():
    core, outside = below(*CORE), below("integrations")
    assert len(core) <= CORE_FILES
    assert lines_of(*core) <= CORE_LINES
    assert len(outside) <= INTEGRATIONS_FILES
    assert lines_of(*outside) <= INTEGRATIONS_LINES


def test_the_lab_stays_smaller_than_the_core():
    studies = below("lab/studies")
    lab = [path for path in below("lab") if path not in studies]
    assert len(lab) <= LAB_FILES
    assert lines_of(*lab) <= LAB_LINES
    assert sum('__name__ == "__main__"' in sources()[path] for path in studies) <= STUDIES
    assert lines_of(*studies) <= STUDIES_LINES


def test_only_tests_of_the_lab_import_a_study():
    others = [path for path in below("tests") if not path.is_relative_to("tests/lab")]
    study = "lab.studies"
    assert [
        at for at in others if any(".".join(one).startswith(study) for one in imports(at))
    ] == []


def test_tests_and_pages_have_a_budget_too():
    assert lines_of(*below("tests")) <= TEST_LINES
    pages = sorted((ROOT / "docs").rglob("*.md"))
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= DOCS_WORDS


def test_a_command_line_that_can_be_remembered():
    """Options of all commands, the lab's too."""
    options = [one for _, command in commands() for one in command.params]
    assert sum(isinstance(one, click.Option) for one in options) <= OPTIONS
