"""The profile's file format: what is written is read back, and stays readable."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from costmodel.calibration.linear import LinearCalibration
from costmodel.calibration.stairs import StairsCalibration
from costmodel.errors import ProfileError
from costmodel.fields import Section
from costmodel.profile.profile import Profile
from costmodel.profile.schema import EngineDrafterSection, RuntimeSection
from costmodel.profile.store import profile_file_name
from costmodel.profile.text import dump_yaml, float_text
from tests.costmodel.conftest import altered, cpu_seconds
from tests.costmodel.profile.test_store import TIMED
from tests.integrations.made_engine_profile import ENGINE, make_engine_profile

STORED = Path(__file__).parents[1] / "data/profile.yaml"


def test_a_stored_file_reads_and_writes_unchanged():
    profile = Profile.from_yaml(STORED)
    assert profile.to_yaml() == STORED.read_text()
    assert profile.surface.mad_s[1] is None
    assert profile.drafters["ngram-1"].name == "ngram"
    assert profile.target.architecture.qk_norm is True
    roofline = profile.roofline("physical")
    assert (roofline.element_bytes, roofline.tensor_parallel) == (2, 2)
    assert (roofline.peaks.bytes_per_s, roofline.count) == (7.68e11, "physical")


floats = st.floats(allow_nan=False, allow_infinity=False, width=64)


@given(value=floats)
def test_floats_keep_six_digits_and_stay_floats(value):
    back = yaml.safe_load(float_text(value))
    assert isinstance(back, float)
    assert back == pytest.approx(value, rel=5e-6, abs=1e-300)


LETTERS = st.characters(
    blacklist_categories=("Cs", "Cc"), blacklist_characters="\ufeff\u2028\u2029"
)


@given(text=st.text(LETTERS, min_size=1, max_size=40))
def test_any_text_survives(text):
    assert yaml.safe_load(dump_yaml({"note": text})) == {"note": text}


def test_the_selected_calibration_predicts(profile):
    calibration = altered(profile, calibration={"selected": "stairs"}).verify_calibration()
    assert isinstance(calibration, StairsCalibration)
    rows = np.array([3, 50, 200])
    assert calibration.predict_s(rows, 500) == pytest.approx(cpu_seconds(rows, 500), rel=0.03)
    linear = altered(profile, calibration={"selected": "linear"})
    calibration = linear.verify_calibration()
    assert isinstance(calibration, LinearCalibration)
    paper_s = linear.roofline("paper").seconds(rows, 500)
    fitted = linear.calibration.linear
    expected = fitted.slope * paper_s + fitted.intercept_s
    assert calibration.predict_s(rows, 500) == pytest.approx(expected)


def test_a_draft_cost_may_be_of_another_time_than_the_rest(profile, tmp_path):
    path = tmp_path / "profile.yaml"
    profile.with_drafter("abc123", TIMED).to_yaml(path)
    stored = Profile.from_yaml(path)
    assert stored.drafters["abc123"] == TIMED
    assert stored.drafter_origin("abc123") == ("quick", "2026-05-01T08:00:00Z")
    assert stored.drafter_origin("ngram-1") == ("measured", profile.provenance.created_utc)
    assert path.read_text().count("created_utc") == 2
    with pytest.raises(ProfileError, match="drafters"):
        profile.with_drafter("not a hash!", TIMED)


def field_names(model: Section) -> set[str]:
    """Names of all fields of a section and of the sections inside it."""
    names = set(type(model).model_fields)
    for value in [getattr(model, name) for name in names]:
        for inner in value.values() if isinstance(value, dict) else [value]:
            if isinstance(inner, Section):
                names |= field_names(inner)
    return names


def test_every_field_is_documented():
    text = (Path(__file__).parents[3] / "docs/profile-format.md").read_text()
    profile = Profile.from_yaml(STORED)
    sizes = {field.name for field in dataclasses.fields(profile.target.architecture)}
    for name in field_names(profile):
        assert f"`{name}`" in text or f"**{name}**" in text, name
    optional = set(profile.target.architecture.to_dict()) ^ sizes
    for name in optional:
        assert f"`{name}`" in text, name


RUNTIME = {"kind": "vllm", "dtype": "bfloat16", "attention": "CPU_ATTN"}
GRID = {
    "name": "ngram", "batch": [1, 1, 2, 2], "tokens": [0, 4, 0, 4], "context": [64, 64, 64, 64],
    "median_s": [0.001, 0.005, 0.002, 0.010], "mad_s": [None] * 4, "n": [1] * 4,
}  # fmt: skip


def test_the_engine_belongs_to_its_runtime_and_its_draft_costs_are_interpolated(tmp_path) -> None:
    profile = make_engine_profile()
    text = profile.to_yaml(tmp_path / "a.yaml")
    assert Profile.from_yaml(tmp_path / "a.yaml").to_yaml() == text
    assert profile_file_name(profile) == "qwen3-8b.bfloat16.vllm.tp1.yaml"
    for kind, engine in (("eager", ENGINE), ("vllm", None)):
        with pytest.raises(ValidationError, match="engine belongs to"):
            RuntimeSection(**(RUNTIME | {"kind": kind}), engine=engine)
    section = EngineDrafterSection(**GRID)
    assert section.seconds(2, 500, 1) == pytest.approx(0.003)
    assert section.seconds(4, 64, 1.5) == pytest.approx(0.0075)
    assert section.seconds(8, 64, 2) == pytest.approx(0.018)


@pytest.mark.parametrize("wrong", [
    {name: values[:3] for name, values in GRID.items() if name != "name"},
    {"batch": [1, 2, 1, 2]},
    {"tokens": [0, 4, 0, 5]},
])  # fmt: skip
def test_draft_costs_must_be_a_full_ascending_grid(wrong: dict) -> None:
    with pytest.raises(ValidationError):
        EngineDrafterSection(**(GRID | wrong))
