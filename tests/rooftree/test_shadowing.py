"""A user's own modules with the names of our packages: one line that names the file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
COMMAND = "from rooftree.__main__ import main; main()"  # what the console script does


def run(*arguments: str, folder: Path, path: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )


def shadow(folder: Path, name: str) -> Path:
    """A file of that name; returns what hides the package: the file, or its folder."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("answer = 42\n")
    return path if path.parent == folder else path.parent


@pytest.mark.parametrize("name", ["decoder.py", "costmodel.py", "decoder/__init__.py"])
def test_command_module_and_script_say_it_in_one_line(tmp_path: Path, name: str) -> None:
    hidden_by = shadow(tmp_path, name)
    (tmp_path / "empty").mkdir()
    path = f"{tmp_path}{os.pathsep}{CHECKOUT}"
    for done in (
        run("-c", COMMAND, "--help", folder=tmp_path / "empty", path=path),
        run("-m", "rooftree", "--help", folder=tmp_path, path=str(CHECKOUT)),
    ):
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"rooftree: {hidden_by}") and "Rename it" in line
        assert f"hides rooftree's own package '{hidden_by.stem}'" in line
    script = tmp_path / "script.py"  # whose own folder comes first on its path
    script.write_text("import rooftree\nprint('imported')\nrooftree.TreeDecoder\n")
    done = run(str(script), folder=CHECKOUT, path=str(CHECKOUT))
    assert (done.returncode, done.stdout) == (1, "imported\n")
    assert f"ShadowedPackageError: {hidden_by}" in done.stderr.splitlines()[-1]


def test_module_that_is_loaded_already(tmp_path: Path) -> None:
    hidden_by = shadow(tmp_path, "decoder.py")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import decoder, rooftree\n"
        "sys.path.pop(0)\n"
        "try:\n    rooftree.load_profile\n"
        "except ImportError as error:\n    print(error)\n"
    )
    done = run("-c", code, folder=CHECKOUT, path=str(CHECKOUT))
    assert done.stdout.startswith(f"{hidden_by} hides rooftree's own package 'decoder'")
