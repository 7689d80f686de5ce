"""The same questions to every folder of integrations, and an engine added by the page alone."""

import importlib
import json
import re
import sys
import tomllib
from pathlib import Path

import click
import pytest

from costmodel.compose.tables import PublishedTables
from costmodel.planning.exports import SettingsWriter
from costmodel.profile.profile import Profile
from tests.conftest import CALIBRATED
from tests.tiny_folder import isolate

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(path.parent for path in (ROOT / "integrations").glob("*/__init__.py"))
GROUPS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
# The doors, and the file of each; a source is the business of its command.
DOORS = {
    "read": ("rooftree.readers",), "settings": ("rooftree.settings",),
    "tables": ("rooftree.operator_tables",), "command": ("rooftree.sources", "rooftree.commands"),
}  # fmt: skip
NAMES = {"__init__", "source", "scheduler", *DOORS}
# What else a folder may have.
PARTS = {
    "aiconfigurator": {"experts", "package"},
    "draft_lengths": {"acceptance", "costs", "pilot", "policy"},
    "openai_server": {"client", "requests"},
    "ray": {"cluster", "fleet"},
    "transformers": {"custom_generate"},
    "vllm": {"adaptive", "configuration", "engine", "worker"},
}


def doors(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """The groups and objects of the entry points into each file of a folder."""
    found: dict[str, list[tuple[str, str]]] = {}
    for group, entries in GROUPS.items():
        for value in entries.values():
            module, _, name = value.partition(":")
            if module.startswith(f"integrations.{folder.name}."):
                found.setdefault(module.rpartition(".")[2], []).append((group, name))
    return found


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_folder_has_the_names_of_its_neighbours_and_each_door_is_registered(folder):
    names, entries = {path.stem for path in folder.glob("*.py")}, doors(folder)
    assert names <= NAMES | PARTS.get(folder.name, set())
    assert ("source" not in names) or "command" in names
    for file, groups in DOORS.items():
        assert (file in names) == (file in entries), file
        for group, name in entries.get(file, ()):
            assert group in groups
            made = getattr(importlib.import_module(f"integrations.{folder.name}.{file}"), name)
            kinds = {"settings": SettingsWriter, "command": click.Command}
            assert isinstance(made, kinds.get(file, PublishedTables)) or (
                file in ("read", "tables") and callable(made)
            )


def step_s(rows: int, context: int, batch: int) -> float:
    """An engine's law: H100-like steps that grow with rows and context."""
    return 8e-3 + 4e-5 * rows * batch + 2e-8 * context * batch


@pytest.fixture
def my_engine(tmp_path, monkeypatch):
    """The package of docs/extending.md, installed: its four files and entry points, no more."""
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    section = page.partition("## An engine")[2].partition("\n## ")[0]
    files = re.findall(
        r"`(\w+\.py)` [^`].*?^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL
    )
    folder = tmp_path / "site"
    package, info = folder / "my_engine", folder / "my_engine-1.0.dist-info"
    for place in (package, info):
        place.mkdir(parents=True)
    (package / "__init__.py").write_text("from tests.integrations.test_folders import step_s\n")
    assert sorted(name[:-3] for name, _ in files) == ["command", "read", "settings", "source"]
    for name, text in files:
        (package / name).write_text(text)
    entries = re.search(r"^```toml\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert entries is not None
    lines = entries[1].replace('"', "").replace("[project.entry-points.", "[")
    (info / "entry_points.txt").write_text(lines)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-engine\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(folder))
    for command in ("fit", "plan"):  # which list the names once a process
        monkeypatch.delitem(sys.modules, f"profiler.commands.{command}", raising=False)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_engine"]:
        del sys.modules[name]


def test_a_strangers_engine_by_the_page_alone(my_engine, monkeypatch, run):
    isolate(monkeypatch, my_engine)
    target, path = ("--target", "qwen3-8b"), my_engine / "mine.yaml"
    code, out, err = run("calibrate", "mine", *target, "--output", str(path), "--json")
    assert code in CALIBRATED and json.loads(out)["path"] == str(path), err
    profile = Profile.from_yaml(path)
    assert profile.runtime.attention == "my engine 1.0"
    predicted_s = profile.verify_calibration().predict_s(8, 512)
    assert predicted_s == pytest.approx(step_s(8, 512, 1), rel=0.02)

    times = my_engine / "times.txt"
    shapes = [(rows, context) for rows in (1, 4, 16, 64) for context in (128, 1024)]
    times.write_text("\n".join(f"{r} {c} {step_s(r, c, 1)}" for r, c in shapes))
    read = run("fit", str(times), "--from", "mine", "--device", "h100-sxm", *target, "--json")
    assert read[0] == 0 and json.loads(read[1])["points"] == len(shapes), read[2]

    asked = ("--engine", "mine", "--acceptance", "0.7", "--drafter", "ngram")
    code, out, err = run("export", "h100-sxm/qwen3-8b", *asked)
    assert code == 0, err
    assert out.startswith("# my engine 1.0 and later")
    assert "my-serve Qwen/Qwen3-8B drafts=[[1," in out
    assert "mine" in run("calibrate", "--help")[1]
