"""Mutants of profiles: a few of the campaign, and each construct a reader could trip over."""

from __future__ import annotations

from itertools import islice

import pytest

from benchmarks.faults.profile_changes import CONSTRUCTS, NUMBERS
from benchmarks.faults.profiles import Fault, Mutant, bases, check, mutants
from costmodel.profile.text import dump_yaml


@pytest.mark.parametrize("name", [name for name, _ in bases()])
def test_the_sound_profiles_are_accepted(name: str) -> None:
    """Otherwise every refusal might have another reason."""
    assert check(Mutant(how=name, raw=dump_yaml(dict(bases())[name]).encode())) == "accepted"


def test_a_fixed_seed_gives_the_same_mutants() -> None:
    assert [*islice(mutants(7), 30)] == [*islice(mutants(7), 30)]
    assert [*islice(mutants(7), 30)] != [*islice(mutants(8), 30)]


@pytest.mark.parametrize("count", [50, pytest.param(400, marks=pytest.mark.slow)])
def test_each_mutant_is_refused_or_as_good_as_any_profile(count: int) -> None:
    verdicts = [check(mutant) for mutant in islice(mutants(count), count)]
    assert {"refused", "accepted"} == set(verdicts)


@pytest.mark.parametrize("part", [*CONSTRUCTS, *NUMBERS], ids=lambda part: repr(part[:24]))
def test_constructs_in_place_of_a_value(part: bytes) -> None:
    text = dump_yaml(bases()[0][1]).encode()
    for line in (b"  points: 153", b"    layers: 36", b"  name: Qwen/Qwen3-8B"):
        assert line in text
        check(Mutant(how="planted", raw=text.replace(line, line.partition(b":")[0] + b": " + part)))
    check(Mutant(how="appended", raw=text + b"extra: " + part))


def test_what_is_no_refusal_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: by a raw exception, and by a time that is none."""
    sound = Mutant(how="sound", raw=dump_yaml(bases()[0][1]).encode())

    def crash(*arguments: object) -> None:
        raise ZeroDivisionError("division by zero")

    with monkeypatch.context() as patch:
        patch.setattr("benchmarks.faults.profiles._chooses", crash)
        with pytest.raises(Fault, match="ZeroDivisionError in test_fault_profiles"):
            check(sound)
    with monkeypatch.context() as patch:
        patch.setattr(
            "costmodel.calibration.linear.LinearCalibration.predict_s",
            lambda self, rows, context, batch=1: 0.0 * rows,
        )
        with pytest.raises(Fault, match="the linear calibration is not finite and above 0"):
            check(sound)
