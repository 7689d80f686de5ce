"""The programs in examples/, run as a user would copy them, with a tiny random target."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from costmodel.profile.store import ProfileStore
from profiler import cli
from rooftree import Drafter, Policy, TreeDecoder
from tests.tiny_folder import fake_clock, isolate

FOLDER = Path(__file__).parents[1] / "examples"
PROMPT = "One, two, three, one, two, three, one,"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def target(tiny_target):
    return str(tiny_target)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    fake_clock(monkeypatch)
    return isolate(monkeypatch, tmp_path)


def test_every_example_has_a_test_and_the_page_shows_some():
    text = Path(__file__).read_text(encoding="utf-8")
    for path in FOLDER.glob("*.py"):
        assert f'load("{path.stem}")' in text, path.name
    page = FOLDER.parent.joinpath("docs", "extending.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    for name, block in zip(("own_drafter", "own_policy"), blocks, strict=False):
        assert block in (FOLDER / f"{name}.py").read_text(encoding="utf-8")


def test_decode_and_plan_fleet(target, capsys):
    load("decode").main(target)
    output = capsys.readouterr().out
    assert output.startswith("no profile for this device and target: probed")
    assert re.search(r"^\d+\.\d tokens/s$", output, re.MULTILINE)
    assert "The sky is ->" in output
    load("plan_fleet").main()
    lines = capsys.readouterr().out.splitlines()
    assert {line.partition(":")[0] for line in lines} == {"h100-sxm", "l40s"}
    assert all("per million tokens" in line for line in lines)


@pytest.mark.parametrize(("main", "name"), [
    (lambda: load("own_drafter").main, "recall"), (lambda: load("own_policy").main, "likely"),
])  # fmt: skip
def test_drafters_and_policies_of_ones_own(target, capsys, main, name):
    main()(target)
    plain = TreeDecoder.from_pretrained(target, policy="plain").generate(PROMPT, max_new_tokens=32)
    text, line = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert text == plain.text
    rate = re.fullmatch(rf"{name}: (\d\.\d\d) tokens a verification", line)
    assert float(rate[1]) >= 1.0


@pytest.mark.slow
def test_calibrate_and_decode(target, home, capsys):
    load("calibrate_and_decode").main(target)
    output = capsys.readouterr().out
    (path,) = [stored.path for stored in ProfileStore().list() if stored.path.is_relative_to(home)]
    assert f"profile: {path}\n" in output
    assert re.search(rf"profile {re.escape(str(path))} \(measured, .*, grade: \w+", output)


@pytest.mark.parametrize(("option", "name", "kind"), [
    ("--drafter", "own_drafter:Recall", Drafter), ("--policy", "own_policy:Likely", Policy),
])  # fmt: skip
def test_on_the_command_line(target, monkeypatch, capsys, option, name, kind):
    monkeypatch.chdir(FOLDER)
    monkeypatch.setattr(sys, "path", list(sys.path))
    arguments = ["generate", "--target", target, "--prompt", PROMPT, "--max-new-tokens", "32"]
    assert cli.run([*arguments, option, name]) == 0
    text = capsys.readouterr().out
    assert cli.run([*arguments, "--policy", "plain"]) == 0
    assert capsys.readouterr().out == text
    assert issubclass(getattr(load(name.partition(":")[0]), name.partition(":")[2]), kind)
