"""The shipped overheads, and what a wrong file says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from costmodel.errors import InputError
from costmodel.planning.batching import engine_overheads, load_overheads

RESULT = Path(__file__).parents[3] / "lab" / "studies" / "results" / "capacity_accuracy.json"


def test_shipped_overheads_are_those_of_the_stored_result():
    stored = json.loads(RESULT.read_text(encoding="utf-8"))["overheads"]
    for engine, fields in stored.items():
        found = dataclasses.asdict(engine_overheads(engine))
        assert found == pytest.approx(fields, rel=1e-3), engine


def test_an_unknown_engine_gets_the_shared_ones():
    assert engine_overheads("lmdeploy") == engine_overheads("shared")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("vllm: {products: 1}", "must map engines, and 'shared'"),
        ("shared: {products: 1}", "shared: must have exactly these fields: products, attention"),
        ("shared: 3", "must have exactly these fields"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, text, problem):
    path = tmp_path / "engines.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=problem) as bad:
        load_overheads(path)
    assert str(path) in bad.value.problem


@pytest.mark.parametrize("value", ["fast", "true", ".nan", "20"])
def test_a_wrong_value_is_named(tmp_path, value):
    fields = dataclasses.asdict(engine_overheads("shared"))
    listed = ", ".join(f"{name}: {value if name == 'step_s' else x}" for name, x in fields.items())
    path = tmp_path / "engines.yaml"
    path.write_text(f"shared: {{{listed}}}", encoding="utf-8")
    with pytest.raises(InputError, match="shared: step_s"):
        load_overheads(path)
