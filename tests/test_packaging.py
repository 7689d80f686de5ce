"""The metadata and the files around the code: dependencies, pins, data, make targets."""

import ast
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

ROOT = Path(__file__).parents[1]
PACKAGES = ("costmodel", "decoder", "integrations", "lab", "profiler", "rooftree")
METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = METADATA["project"]

# Import names that differ from the distribution's name.
DISTRIBUTIONS = {"yaml": "pyyaml", "pynvml": "nvidia-ml-py", "optimum": "optimum-quanto"}
# Come with a declared dependency, at the version that suits it; triton with PyTorch's CUDA builds.
IMPLIED = {"tokenizers": "transformers", "huggingface_hub": "transformers", "triton": "torch",
           "llvmlite": "numba"}  # fmt: skip

# Runs by an interpreter that has an engine, and not by the one that has rooftree.
ELSEWHERE = ROOT / "lab" / "bench" / "engines" / "worker.py"


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


def third_party_imports() -> dict[str, str]:
    """Import name of every package that the code imports from elsewhere, and a file that does."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        for path in set((ROOT / package).rglob("*.py")) - {ELSEWHERE}:
            for node in ast.walk(ast.parse(path.read_text())):
                names = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                    names = [node.module]
                for name in names:
                    top = name.partition(".")[0]
                    if top not in sys.stdlib_module_names and top not in PACKAGES:
                        found[top] = str(path.relative_to(ROOT))
    return found


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


@pytest.mark.parametrize("installed", ["2.11.0", "2.12.1+cpu", "2.13.0+cu130"])
def test_an_installed_torch_satisfies_the_range(installed):
    (allowed,) = [item.specifier for item in requirements() if item.name == "torch"]
    assert Version(installed) in allowed


def test_every_import_is_declared():
    declared = {normal(item.name) for item in requirements()}
    for name, path in third_party_imports().items():
        distribution = normal(DISTRIBUTIONS.get(name, IMPLIED.get(name, name)))
        assert distribution in declared, f"{path} imports {name}, which is not declared"


def test_a_worker_imports_nothing_of_this_project():
    names = [
        getattr(node, "module", None) or alias.name
        for node in ast.walk(ast.parse(ELSEWHERE.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    ]
    assert "json" in names and not {name.partition(".")[0] for name in names} & set(PACKAGES)


def test_every_data_file_goes_into_the_wheel():
    patterns = METADATA["tool"]["setuptools"]["package-data"]
    for package in (*PACKAGES, "calibrations"):
        folder = ROOT / package
        packed = {path for pattern in patterns.get(package, ()) for path in folder.glob(pattern)}
        for path in folder.rglob("*"):
            if path.is_relative_to(ROOT / "lab/studies"):  # of a checkout
                continue
            if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts:
                assert path in packed, path.relative_to(ROOT)


@pytest.mark.parametrize("extra", ["demo", "train"])
def test_the_demo_model_can_be_made_with_this_extra(extra):
    names = {Requirement(text).name for text in PROJECT["optional-dependencies"][extra]}
    assert {"accelerate", "gguf"} <= names  # what decoder/model/demo_model.py asks for


def test_the_console_script_exists():
    module, _, function = PROJECT["scripts"]["rooftree"].partition(":")
    assert callable(getattr(import_module(module), function))


def test_the_changelog_and_the_citation_are_of_this_version():
    assert PROJECT["version"] in (ROOT / "CHANGELOG.md").read_text()
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])


def test_the_workflow_runs_every_job_of_the_checks_and_the_quick_tests_on_each_python():
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


def test_the_checks_take_a_job_and_refuse_any_other_word():
    command = ["bash", str(ROOT / ".ci/run"), "everything"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "checks, quick or slow" in done.stdout) == (2, True)


def made(*words: str) -> str:
    """What make would run, in an environment that does not exist."""
    command = ["make", "--dry-run", "VENV=/nonexistent/venv", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


@pytest.mark.parametrize(("target", "command"), [
    ("calibrate", "rooftree calibrate"),
    ("test", "python -m pytest"),
    ("demo", "rooftree demo-model --run"),
    ("lint", "ruff check ."),
    ("docs", "mkdocs build --strict"),
])  # fmt: skip
def test_each_make_target_creates_the_environment_first(target, command):
    told = made(target)
    assert told.index("install -qq -c") < told.index(f"/nonexistent/venv/bin/{command}")


def test_make_uses_an_installed_torch_when_asked():
    told = made("SYSTEM_PACKAGES=1", "environment")
    assert "--system-site-packages" in told and "-v '^torch=='" in told
