"""Profiles as a format of the fault campaign: each construct that a reader could trip over."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from costmodel.profile.text import dump_yaml
from lab.studies.faults.judge import judge
from lab.studies.faults.mutations import mutated
from lab.studies.faults.profile_changes import CONSTRUCTS, NUMBERS
from lab.studies.faults.profiles import sound_profiles, use_profile

SOUND = {name: dump_yaml(data).encode() for name, data in sound_profiles().items()}


def outcome(folder: Path, raw: bytes) -> str:
    (folder / "profile.yaml").write_bytes(raw)
    verdict = judge(lambda: use_profile(folder))
    return verdict.reason or verdict.outcome


@pytest.mark.parametrize("name", SOUND)
def test_the_sound_profiles_are_accepted(name: str, tmp_path: Path) -> None:
    """Otherwise every refusal might have another reason."""
    assert outcome(tmp_path, SOUND[name]) == "accepted"


@pytest.mark.parametrize("count", [50, pytest.param(400, marks=pytest.mark.slow)])
def test_each_mutant_is_refused_or_as_good_as_any_profile(count: int, tmp_path: Path) -> None:
    names = [*SOUND]
    found = {
        outcome(tmp_path, mutated(SOUND[names[i % len(names)]], "profile", Random(i)))
        for i in range(count)
    }
    assert found == {"refused", "accepted"}


@pytest.mark.parametrize("part", [*CONSTRUCTS, *NUMBERS], ids=lambda part: repr(part[:24]))
def test_constructs_in_place_of_a_value(part: bytes, tmp_path: Path) -> None:
    text = SOUND["qwen3-8b"]
    for line in (b"  points: 153", b"    layers: 36", b"  name: Qwen/Qwen3-8B"):
        assert line in text
        changed = text.replace(line, line.partition(b":")[0] + b": " + part)
        assert outcome(tmp_path, changed) in ("refused", "accepted")
    assert outcome(tmp_path, text + b"extra: " + part) == "refused"


def test_what_is_no_refusal_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The check can fail: by a raw exception, and by a time that is none."""

    def crash(*arguments: object) -> None:
        raise ZeroDivisionError("division by zero")

    with monkeypatch.context() as patch:
        patch.setattr("lab.studies.faults.profiles._chooses", crash)
        assert "ZeroDivisionError" in outcome(tmp_path, SOUND["qwen3-8b"])
    with monkeypatch.context() as patch:
        patch.setattr(
            "costmodel.calibration.linear.LinearCalibration.predict_s",
            lambda self, rows, context, batch=1: 0.0 * rows,
        )
        found = outcome(tmp_path, SOUND["qwen3-8b"])
        assert found == "wrong: the linear calibration is no finite number above 0"
