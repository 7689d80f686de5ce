"""The profile's file format: what is written is read back, and stays readable."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from costmodel.calibration.linear import LinearCalibration, fit_linear
from costmodel.calibration.points import Points
from costmodel.calibration.stairs import StairsCalibration
from costmodel.errors import ProfileError
from costmodel.fields import Section
from costmodel.profile.profile import Profile
from costmodel.profile.schema import (
    CalibrationSection,
    EngineDrafterSection,
    RuntimeSection,
    SurfaceSection,
)
from costmodel.profile.store import profile_file_name
from costmodel.profile.text import dump_yaml, float_text
from tests.costmodel.conftest import ROOFLINE, altered, cpu_seconds
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
seconds = st.floats(1e-9, 1e4)


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


@st.composite
def surfaces(draw):
    shapes = st.tuples(st.integers(1, 1024), st.integers(0, 8192), st.integers(1, 8))
    several = st.sets(shapes, min_size=6, max_size=40)
    keys = draw(several.filter(lambda found: len({rows for rows, _, _ in found}) > 2))
    rows, context, batch = (list(column) for column in zip(*sorted(keys), strict=True))
    size = len(rows)
    each = {"min_size": size, "max_size": size}
    times = draw(st.lists(st.floats(1e-4, 10), unique=True, **each))
    shares = draw(st.lists(st.floats(0, 0.99) | st.just(float("nan")), **each))
    return Points(
        rows=rows, context=context, batch=batch, seconds=times,
        mad_s=[share * time for share, time in zip(shares, times, strict=True)],
        n=draw(st.lists(st.integers(1, 99), **each)),
    )  # fmt: skip


@settings(max_examples=30)
@given(points=surfaces())
def test_any_measured_surface_round_trips_and_predicts_the_same(points, profile):
    linear = {"linear": fit_linear(points, ROOFLINE).model_dump(), "selected": "stairs"}
    sections = CalibrationSection.model_validate(profile.calibration.model_dump() | linear)
    parts = {"calibration": sections, "surface": SurfaceSection.of(points)}
    made = Profile.model_validate(profile.model_dump() | {"target": profile.target} | parts)
    text = made.to_yaml()
    loaded = Profile.from_bytes(text.encode(), "memory")
    assert loaded.to_yaml() == text
    back, expected = loaded.surface.points(), points.sorted()
    for name in ("rows", "context", "batch", "n"):
        assert np.array_equal(getattr(back, name), getattr(expected, name))
    assert back.seconds == pytest.approx(expected.seconds, rel=1e-5)
    assert np.array_equal(np.isnan(back.mad_s), np.isnan(expected.mad_s))
    rows = np.array([1, 7, 300])
    before = made.verify_calibration().predict_s(rows, 500)
    assert np.all(np.isfinite(before)) and np.all(before > 0)
    assert loaded.verify_calibration().predict_s(rows, 500) == pytest.approx(before, rel=1e-3)


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


def test_the_engine_belongs_to_its_runtime(tmp_path) -> None:
    profile = make_engine_profile()
    text = profile.to_yaml(tmp_path / "a.yaml")
    assert Profile.from_yaml(tmp_path / "a.yaml").to_yaml() == text
    assert profile_file_name(profile) == "qwen3-8b.bfloat16.vllm.tp1.yaml"
    for kind, engine in (("eager", ENGINE), ("vllm", None)):
        with pytest.raises(ValidationError, match="engine belongs to"):
            RuntimeSection(**(RUNTIME | {"kind": kind}), engine=engine)


def test_draft_costs_between_and_beyond_the_points() -> None:
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
