"""The metadata and the files around the code: dependencies, pins, data, make targets."""

import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from tests.source_files import PACKAGES, ROOT, below, imports

METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = METADATA["project"]

# Import names that differ from the distribution's name.
DISTRIBUTIONS = {"yaml": "pyyaml", "pynvml": "nvidia-ml-py", "optimum": "optimum-quanto"}
# Come with a declared dependency, at the version that suits it; triton with PyTorch's CUDA builds.
IMPLIED = {"tokenizers": "transformers", "huggingface_hub": "transformers", "triton": "torch",
           "llvmlite": "numba"}  # fmt: skip

# Runs by an interpreter that has an engine, and not by the one that has rooftree.
ELSEWHERE = Path("lab/bench/engines/worker.py")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {normal(name): version for name, version in pairs}


def requirements() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"].values()
    every = [Requirement(text) for group in (PROJECT["dependencies"], *extras) for text in group]
    return [requirement for requirement in every if requirement.name != PROJECT["name"]]


@pytest.mark.parametrize("requirement", requirements(), ids=lambda item: item.name)
def test_every_dependency_has_a_range_and_a_pin_inside_it(requirement):
    assert requirement.specifier, f"{requirement.name} has no range"
    assert not any(part.operator == "==" for part in requirement.specifier)
    pin = pins().get(normal(requirement.name))
    if requirement.name in IMPLIED:
        assert pin is None, f"{requirement.name} follows {IMPLIED[requirement.name]}"
        return
    assert pin is not None, f"{requirement.name} is not in constraints.txt"
    assert Version(pin) in requirement.specifier
    if requirement.name == "torch":  # one that is installed satisfies the range
        installed = ("2.11.0", "2.12.1+cpu", "2.13.0+cu130")
        assert all(Version(one) in requirement.specifier for one in installed)


def test_every_import_is_declared_and_every_data_file_packed():
    """A worker imports nothing of this project."""
    declared = {normal(item.name) for item in requirements()}
    by_file = {path: {name.partition(".")[0] for name, _ in imports(path)}
               for path in below(*PACKAGES)}  # fmt: skip
    assert "json" in by_file[ELSEWHERE] and not by_file.pop(ELSEWHERE) & set(PACKAGES)
    for path, names in by_file.items():
        for name in names - sys.stdlib_module_names - set(PACKAGES):
            distribution = normal(DISTRIBUTIONS.get(name, IMPLIED.get(name, name)))
            assert distribution in declared, f"{path} imports {name}, which is not declared"
    patterns = METADATA["tool"]["setuptools"]["package-data"]
    for package in (*PACKAGES, "calibrations"):
        folder = ROOT / package
        packed = {path for pattern in patterns.get(package, ()) for path in folder.glob(pattern)}
        for path in folder.rglob("*"):
            if path.is_relative_to(ROOT / "lab/studies"):  # of a checkout
                continue
            if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts:
                assert path in packed, path.relative_to(ROOT)


def test_script_extras_changelog_and_citation_are_those_of_the_metadata():
    module, _, function = PROJECT["scripts"]["rooftree"].partition(":")
    assert callable(getattr(import_module(module), function))
    for extra in ("demo", "train"):
        names = {Requirement(text).name for text in PROJECT["optional-dependencies"][extra]}
        assert {"accelerate", "gguf"} <= names  # what decoder/model/demo_model.py asks for
    assert PROJECT["version"] in (ROOT / "CHANGELOG.md").read_text()
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])


def test_the_workflow_runs_every_job_of_the_checks_which_refuse_any_other_word():
    text = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    commands = {name: f"bash .ci/run {name}" for name in ("checks", "quick", "slow")}
    commands["newest"] = "make test-newest"
    assert jobs.keys() == commands.keys()
    for name, command in commands.items():
        assert any(step.get("run", "").startswith(command) for step in jobs[name]["steps"])
    promised = {one.rpartition(" ")[2] for one in PROJECT["classifiers"] if " 3." in one}
    assert set(jobs["quick"]["strategy"]["matrix"]["python"]) == promised
    newest = set(jobs["newest"]["strategy"]["matrix"]["python"])
    assert newest - promised == {"3.14"}  # tried by the workflow alone, so not promised yet
    command = ["bash", str(ROOT / ".ci/run"), "everything"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "checks, quick or slow" in done.stdout) == (2, True)


@pytest.mark.parametrize(("target", "command"), [
    ("calibrate", "/bin/rooftree calibrate"), ("test", "/bin/python -m pytest"),
    ("demo", "/bin/rooftree demo-model --run"), ("lint", "/bin/ruff check ."),
    ("docs", "/bin/mkdocs build --strict"),
])  # fmt: skip
def test_each_make_target_creates_the_environment_first(target, command):
    words = ["make", "--dry-run", "VENV=/nonexistent/venv", "SYSTEM_PACKAGES=1", target]
    told = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert told.index("install -qq -c") < told.index(f"/nonexistent/venv{command}")
    assert "--system-site-packages" in told and "-v '^torch=='" in told
