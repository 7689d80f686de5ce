"""A small fixed-seed form of the fault campaign, and its verdicts on inputs known to be bad."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.faults import judge as judging
from benchmarks.faults.formats import FORMATS, Format
from benchmarks.faults.inputs import all_formats, run_inputs
from benchmarks.faults.judge import Wrong, judge
from benchmarks.faults.mutations import mutated
from costmodel.errors import InputError

QUICK = {"trace": 150, "times": 150, "prompts": 150, "journal": 80, "config": 60, "catalogue": 25}
SLOW = {name: 10 for name in all_formats() if name not in QUICK}


def count(name: str, inputs: int, folder: Path) -> None:
    found = run_inputs(all_formats()[name], 7, range(inputs), folder)
    assert found["failures"] == {}
    assert found["inputs"] == inputs
    assert found["refused"] > 0


@pytest.mark.parametrize("name", QUICK)
def test_mutants_of_what_is_read_without_a_model(tmp_path: Path, name: str) -> None:
    count(name, QUICK[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_mutants_of_everything_else(tmp_path: Path, name: str) -> None:
    count(name, SLOW[name], tmp_path)


def fails(error: BaseException) -> None:
    raise error


def test_verdicts() -> None:
    """Otherwise a campaign without failures might have another reason."""
    assert judge(lambda: None).outcome == "accepted"
    assert judge(lambda: fails(InputError("no"))).outcome == "refused"
    for error in (ValueError("x"), RecursionError(), MemoryError(), Wrong("text"), SystemExit(1)):
        assert judge(lambda error=error: fails(error)).outcome == "failed"
    assert "message of" in judge(lambda: fails(InputError("x", hint="y" * 800))).reason


def test_a_hang_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "LIMIT_S", 0.05)
    assert judge(lambda: time.sleep(30)).reason.startswith("hang")


def test_a_reader_without_checks_fails(tmp_path: Path) -> None:
    """Mutants find what a plain reader of JSON lets through."""
    import json

    def use(folder: Path) -> None:
        data = json.loads((folder / "a.json").read_text())
        if not data["sizes"][0] * data["sizes"][1] > 0:
            raise InputError("not above 0")

    def make(folder: Path) -> None:
        (folder / "a.json").write_text('{"sizes": [3, 4], "name": "x"}')

    form = Format(name="bare", make=make, kinds={"*.json": "json"}, use=use)
    found = run_inputs(form, 0, range(200), tmp_path)
    kinds = {reason.split()[0] for reason in found["failures"]}
    assert {"JSONDecodeError", "TypeError", "KeyError"} <= kinds


def test_mutations_follow_their_seed(tmp_path: Path) -> None:
    from random import Random

    for form in FORMATS:
        folder = tmp_path / form.name
        folder.mkdir()
        form.make(folder)
        for pattern, kind in form.kinds.items():
            raw = next(folder.glob(pattern)).read_bytes()
            mutants = [mutated(raw, kind, Random(number)) for number in range(40)]
            assert mutants == [mutated(raw, kind, Random(number)) for number in range(40)]
            assert Counter(mutants)[raw] < 10
            assert len(set(mutants)) > 20
