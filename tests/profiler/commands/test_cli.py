"""The command line: errors once and on one line, exit codes, and nothing heavy to answer --help."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import click
import pytest

from costmodel.errors import DeviceError, InputError, MeasurementError, ProfileError, RooftreeError
from profiler import cli

ROOT = Path(__file__).parents[3]
PROGRAM = [sys.executable, "-c", "from profiler.cli import main; main()"]


@pytest.fixture
def raising(monkeypatch):
    """A subcommand `fail` that raises what the test asks for."""

    def install(error):
        @click.command()
        def command():
            raise error

        module = ModuleType("profiler.commands.fail")
        module.command = command
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(cli.COMMANDS, "fail", ("fail.command", "Fails."))

    return install


def test_help_lists_every_command_with_its_line_and_imports_nothing_heavy():
    program = (
        "import sys; from profiler.cli import run\n"
        "codes = [run(words) for words in (['--help'], [], ['profiles', '--help'])]\n"
        "heavy = {'torch', 'transformers', 'numpy', 'scipy', 'pydantic', 'rich', 'numba', "
        "'matplotlib', 'yaml', 'psutil', 'pynvml'}\n"
        "print(codes, sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert result.stderr == "[0, 0, 0] []\n"
    for name, (_, line) in cli.COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(line)}$", result.stdout, re.MULTILINE)


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_has_the_help_that_is_listed(name, run):
    code, out, err = run(name, "--help")
    assert code == 0, err
    assert out.startswith(f"Usage: rooftree {name} ")


@pytest.mark.parametrize(("arguments", "message"), [
    (["bogus"], "No such command 'bogus'. See 'rooftree --help'."),
    (["calibrat"], "No such command calibrat. Did you mean calibrate? See 'rooftree --help'."),
    (["--bogus"], "No such option '--bogus'. See 'rooftree --help'."),
    (["demo-model", "--bogus"], "No such option '--bogus'. See 'rooftree demo-model --help'."),
])  # fmt: skip
def test_wrong_usage_is_one_line(refused, arguments, message):
    # click 8.1 and later differ in a colon and quotes.
    squeeze = str.maketrans("", "", ":'")
    line = refused(*arguments)
    assert line.translate(squeeze) == f"rooftree: {message}\n".translate(squeeze)


@pytest.mark.parametrize(("kind", "exit_code"), [
    (RooftreeError, 1), (InputError, 2), (ProfileError, 3), (DeviceError, 4), (MeasurementError, 5),
])  # fmt: skip
def test_each_error_is_one_line_with_its_exit_code(raising, refused, kind, exit_code):
    raising(kind("the file\nis missing", hint="Give another."))
    line = refused("fail", exit_code=exit_code)
    assert line == "rooftree: the file is missing. Give another.\n"


def test_exit_codes_are_those_of_the_page(run):
    """Commands that end with most of them: test_before_torch.py."""
    page = " ".join((ROOT / "docs/usage.md").read_text(encoding="utf-8").split())
    listed = re.search(r"Exit codes: (.*?)\. After", page)
    assert listed is not None
    table = dict(part.split(" ", 1) for part in listed[1].split("; "))
    own = {kind.exit_code for kind in (InputError, ProfileError, DeviceError, MeasurementError)}
    others = {cli.EXIT_OUTPUT, cli.EXIT_INTERNAL, cli.EXIT_INTERRUPTED, cli.EXIT_BROKEN_PIPE}
    assert {int(one) for one in table} == own | others
    for code, word in (("2", "files"), ("3", "profiles"), ("4", "devices"), ("6", "output")):
        assert word in table[code]
    assert run("profiles", "validate", "none.yaml")[0] == 3


def test_an_unexpected_error_and_an_interruption_are_one_line(raising, run, refused, monkeypatch):
    monkeypatch.delenv("ROOFTREE_DEBUG", raising=False)
    raising(KeyError("lost"))
    line = refused("fail", exit_code=70)
    assert "unexpected KeyError: 'lost'" in line and "ROOFTREE_DEBUG=1" in line
    monkeypatch.setenv("ROOFTREE_DEBUG", "1")
    code, _, err = run("fail")
    assert code == 70 and "Traceback (most recent call last)" in err
    raising(KeyboardInterrupt())
    code, _, err = run("fail")
    assert (code, err.strip()) == (130, "rooftree: interrupted")


@pytest.mark.parametrize("command", ["generate", "calibrate url", "profiles show", "bench"])
def test_help_tells_of_json(run, command):
    assert "With --json the result is one JSON object" in run(*command.split(), "--help")[1]


@pytest.mark.parametrize("arguments", [("--help",), ("targets",)])
def test_a_closed_pipe_is_quiet(arguments):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        result = subprocess.run(
            [*PROGRAM, *arguments], stdout=closed, stderr=subprocess.PIPE, text=True, check=False,
            cwd=ROOT,
        )  # fmt: skip
    assert result.stderr == ""
    assert result.returncode == cli.EXIT_BROKEN_PIPE == 141
