"""A small fixed-seed form of the fault campaign, and its verdicts on inputs known to be bad."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from itertools import count as count_from
from pathlib import Path
from random import Random
from typing import Any

import pytest

from costmodel.errors import InputError
from lab.studies.faults import judge as judging
from lab.studies.faults.__main__ import SHARES, counts_of, failures_of
from lab.studies.faults.commands import Ended, Place
from lab.studies.faults.formats import FORMATS, Format
from lab.studies.faults.inputs import all_formats, run_all, run_inputs, use_again
from lab.studies.faults.judge import Wrong, judge
from lab.studies.faults.kills import _kill_until_done
from lab.studies.faults.mutations import mutated

QUICK = {
    "trace": 150, "times": 150, "prompts": 150, "journal": 80, "config": 60, "catalogue": 25,
    "owner": 50,
}  # fmt: skip
MENDED = ("owner", "structure", "features")  # what is damaged there is done again
SLOW = {name: 10 for name in all_formats() if name not in QUICK}


def count(name: str, inputs: int, folder: Path) -> None:
    found = run_inputs(all_formats()[name], 7, range(inputs), folder)
    assert found["failures"] == {}
    assert found["inputs"] == inputs
    assert (found["refused"] > 0) == (name not in MENDED)


@pytest.mark.parametrize("name", QUICK)
def test_mutants_of_what_is_read_without_a_model(tmp_path: Path, name: str) -> None:
    count(name, QUICK[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_mutants_of_everything_else(tmp_path: Path, name: str) -> None:
    count(name, SLOW[name], tmp_path)


def fails(error: BaseException) -> None:
    raise error


def test_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a campaign without failures might have another reason."""
    assert judge(lambda: None).outcome == "accepted"
    assert judge(lambda: fails(InputError("no"))).outcome == "refused"
    for error in (ValueError("x"), RecursionError(), MemoryError(), Wrong("text"), SystemExit(1)):
        assert judge(lambda error=error: fails(error)).outcome == "failed"
    monkeypatch.setattr(judging, "LONGEST_MESSAGE", 20)
    assert "message of" in judge(lambda: fails(InputError("x", hint="y" * 20))).reason


def test_a_hang_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits, and one that computes."""
    monkeypatch.setattr(judging, "LIMIT_WALL_S", 0.05)
    assert judge(lambda: time.sleep(30)).reason.startswith("hang")
    monkeypatch.setattr(judging, "LIMIT_WALL_S", 300.0)
    monkeypatch.setattr(judging, "LIMIT_CPU_S", 0.05)
    assert judge(lambda: all(number >= 0 for number in count_from(0))).reason.startswith("hang")


def test_waiting_for_the_processor_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "LIMIT_CPU_S", 0.2)
    assert judge(lambda: time.sleep(0.5)).outcome == "accepted"


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


def test_every_format_has_a_share() -> None:
    assert set(SHARES) == set(all_formats())
    counts = counts_of(argparse.Namespace(format=None, mutations=100_000))
    assert sum(counts.values()) == 100_000
    assert min(counts.values()) >= 500


def test_counts_of_several_runs_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of a seed are used once, those of another beside them; failures stay listed."""
    used: list[tuple[int, int, int]] = []

    def chunk(name: str, numbers: range, seed: int) -> dict[str, object]:
        used.append((seed, numbers.start, numbers.stop))
        failures = {"why": [f"{seed}/{numbers.start}"]}
        counts = {"inputs": len(numbers), "refused": len(numbers) - 1, "failed": 1}
        return counts | {"failures": failures}

    monkeypatch.setattr("lab.studies.faults.inputs.run_chunk", chunk)
    totals: dict[str, Any] = {}
    stored: list[int] = []
    for count, seed in ((300, 0), (300, 0), (700, 0), (200, 5)):
        run_all(
            {"target": count}, seed, 1, lambda line: None, totals,
            lambda: stored.append(totals["target"]["inputs"]),
        )  # fmt: skip
    assert used == [(0, 0, 250), (0, 250, 300), (0, 300, 550), (0, 550, 700), (5, 0, 200)]
    assert stored == [250, 300, 550, 700, 900]
    total = totals["target"]
    assert total["seeds"] == {"0": 700, "5": 200}
    assert total["failures"] == {"why": ["0/0", "0/250", "0/300", "0/550", "5/0"]}
    assert (total["refused"], total["failed"]) == (895, 5)
    assert failures_of({"inputs": totals}) == 5


def test_a_listed_input_can_be_used_again(tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        (folder / "a.txt").write_text("sound")

    def use(folder: Path) -> None:
        raise KeyError((folder / "a.txt").read_bytes())

    form = Format(name="bare", make=make, kinds={"*.txt": "text"}, use=use)
    seen = []
    for place in ("one", "two"):
        with pytest.raises(KeyError) as caught:
            use_again(form, "3/14", tmp_path / place)
        seen.append(caught.value.args)
    assert seen[0] == seen[1]


def test_a_run_that_ends_before_its_kill_is_the_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One more calibration would replace the samples, which the check would take for lost."""
    place = Place(folder=tmp_path, target=tmp_path)
    journal, samples = place.home / "journals" / "a.jsonl", place.home / "p.samples.jsonl"
    journal.parent.mkdir(parents=True)
    runs: list[str] = []

    def run(self: Place, command: str, **options: object) -> Ended:
        runs.append(command)
        if len(runs) == 1:
            journal.write_text("header\nfirst\nsecond\n")
        elif journal.exists():
            journal.rename(samples)
        else:
            samples.write_text("header\nanew\n")
        return Ended(exit_code=-9 if len(runs) == 1 else 0, stdout=b"", stderr="", cpu_s=1.0)

    monkeypatch.setattr(Place, "run", run)
    counts: dict[str, Any] = {"kills": 0, "ended": 0, "resumed": 0, "failures": []}
    _kill_until_done("calibrate", place, Random(0), (9, 1.0), counts)
    assert counts == {"kills": 1, "ended": 1, "resumed": 0, "failures": []}
    assert len(runs) == 2


def test_mutations_follow_their_seed(tmp_path: Path) -> None:
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
