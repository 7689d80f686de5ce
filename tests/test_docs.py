"""The pages name what exists: files, modules, classes, options, and each other."""

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from profiler.cli import cli
from tests.source_files import PACKAGES, ROOT, below, commands, parsed, sources

PAGES = (
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "decoder" / "demo" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
)  # fmt: skip
HISTORY = "LOG.md"  # may name what was tried and left out
CODE = (*PACKAGES, "examples", "tests")
DATA = ("calibrations", "docs")
FOLDERED = re.compile(rf"(?<![\w./~-])(?:{'|'.join(CODE + DATA)})/[\w./-]*")
PYTHON_FILE = re.compile(r"(?<![\w/.])\w[\w/]*\.py\b")  # or the last part of its path
MODULE = re.compile(rf"(?:{'|'.join(CODE)})(?:\.\w+)+")
IMPORT = re.compile(r"^\s*from ([\w.]+) import (.+)$", re.MULTILINE)
FENCE = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
NAME = re.compile(r"[A-Z][a-z0-9]+(?:[A-Z][A-Za-z0-9]*)+|[a-z]\w*_\w+")  # a class, or snake_case
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
COMMAND = re.compile(r"^(?:\$ )?rooftree ((?:.*\\\n)*.*)$", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")


@cache
def code() -> str:
    """The text of every Python file but the tests, which name what does not exist."""
    return "\n".join(sources()[path] for path in below(*PACKAGES, "examples"))


@cache
def words() -> set[str]:
    return set(re.findall(r"\w+", code()))


OF_PIP = {"--implementation", "--platform", "--python-version"}


@cache
def options() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(OPTION.findall(code() + makefile)) | OF_PIP


def has_module(dotted: str) -> bool:
    """Whether this is a module, or a name that its longest module contains."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        base = Path(*parts[:length])
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path in sources():
                names = set(re.findall(r"\w+", sources()[path]))
                return length + 1 >= len(parts) and set(parts[length:]) <= names
    return False


def missing(text: str) -> dict[str, list[str]]:
    """Everything that a page names and that is not there, by kind."""
    spans = SPAN.findall(text)
    imports = [
        f"{module}.{name.split()[0]}"
        for module, names in IMPORT.findall(text)
        if module.partition(".")[0] in CODE
        for name in names.split(",")
    ]
    modules = [span for span in spans if MODULE.fullmatch(span) and not span.endswith(".py")]
    modules += re.findall(r"python -m ((?:lab|profiler)[\w.]+)", text)
    modules += re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)
    named = [span.removesuffix("()") for span in spans]
    return {
        "paths": [
            path for path in FOLDERED.findall(text) if not (ROOT / path.rstrip("./")).exists()
        ],
        "files": [
            name
            for name in PYTHON_FILE.findall(text)
            if not any(f"/{path.as_posix()}".endswith(f"/{name}") for path in sources())
        ],
        "modules": [name for name in modules + imports if not has_module(name)],
        "names": [name for name in named if NAME.fullmatch(name) and name not in words()],
        "options": [name for name in OPTION.findall(text) if name not in options()],
    }


@cache
def options_by_command() -> dict[str, set[str]]:
    return {
        words: {name for one in (*command.params, *cli.params)
                for name in one.opts + one.secondary_opts}
        for words, command in commands()
    }  # fmt: skip


def unknown_options(line: str) -> list[str]:
    """The command, if there is none of this name, or the options that it does not take."""
    words = shlex.split(line, comments=True)
    length = max(n for n in range(3) if " ".join(words[:n]) in options_by_command())
    if not length and words and not words[0].startswith("-"):
        return words[:1]
    known = options_by_command()[" ".join(words[:length])] | {"--help"}
    return [word for word in words if word.startswith("--") and word not in known]


def test_missing_names_are_found():
    """Otherwise the test below might pass for another reason."""
    text = """See costmodel/nowhere.py, `gone.py`, `decoder.rounds.Nothing` and `OldClass` with
    `--no-such-option`; costmodel/roofline.py, `startup.py`, `costmodel.roofline.Roofline`,
    `TreeDecoder`, ~/rooftree/x and `--policy` exist.

    from costmodel.planning.request import Goals, Absent
    """
    assert missing(text) == {
        "paths": ["costmodel/nowhere.py"], "files": ["costmodel/nowhere.py", "gone.py"],
        "modules": ["decoder.rounds.Nothing", "costmodel.planning.request.Absent"],
        "names": ["OldClass"], "options": ["--no-such-option"],
    }  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page):
    text = page.read_text(encoding="utf-8")
    gone = missing(text)
    if page.name == HISTORY:
        gone["names"] = []
    gone["links"] = [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    lines = [line.replace("\\\n", " ") for line in COMMAND.findall("".join(FENCE.findall(text)))]
    spans = [span for span in SPAN.findall(text) if span.startswith("rooftree ")]
    lines += [span.removeprefix("rooftree ") for span in spans if "COMMAND" not in span]
    gone["commands"] = [(line, unknown_options(line)) for line in lines if unknown_options(line)]
    assert {kind: names for kind, names in gone.items() if names} == {}


def texts(tree: ast.Module) -> Iterator[str]:
    """The texts of a module; a value that is put into one is `X`."""
    inside = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)
              for part in ast.walk(node) if part is not node}  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inside:
            yield node.value
        if isinstance(node, ast.JoinedStr) and node not in inside:
            parts = [part.value if isinstance(part, ast.Constant) else "X" for part in node.values]
            yield "".join(map(str, parts))


def test_commands_in_messages_can_be_run():
    found, unknown = 0, {}
    for path in below(*PACKAGES):
        for text in texts(parsed(path)) if "`rooftree " in sources()[path] else ():
            for span in SPAN.findall(text):
                if span.startswith("rooftree "):
                    found += 1
                    if names := unknown_options(span.removeprefix("rooftree ")):
                        unknown[f"{path}: {span}"] = names
    assert found > 50
    assert unknown == {}


OF_OTHERS = {
    "--head", "--model", "--nproc-per-node", "--outtype",  # ray, optimum, torchrun, ggml
    "--data-parallel-size", "--enable-expert-parallel",  # vllm
}  # fmt: skip


def test_options_in_hints_exist():
    """Studies have options of their own."""
    hints = {
        (option, path)
        for path in below(*PACKAGES)
        if not path.is_relative_to("lab/studies")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.keyword) and node.arg == "hint"
        for option in OPTION.findall(ast.unparse(node.value))
    }
    taken = OF_OTHERS.union(*options_by_command().values())
    assert [one for one in hints if one[0] not in taken] == []


def test_the_tour_has_every_folder():
    tour = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    folders = {path.parent.as_posix() for path in below(*PACKAGES, "examples")}
    # below a tool's, a paper's or a drafter's folder its own `__init__.py` says what is there
    inner = re.compile(r"integrations/|lab/\w+/")
    missing = [one for one in folders if not inner.match(one) and f"- `{one}/` " not in tour]
    assert sorted(missing) == []
