"""Profiles of serving engines: their keys, drafters and round trip."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from costmodel.errors import ProfileError
from costmodel.profile.profile import Profile
from costmodel.profile.schema import EngineDrafterSection, RuntimeSection
from costmodel.profile.store import ProfileStore, profile_file_name
from tests.integrations.made_engine_profile import ENGINE, make_engine_profile

RUNTIME = {"kind": "vllm", "dtype": "bfloat16", "attention": "CPU_ATTN"}
GRID = {
    "name": "ngram",
    "batch": [1, 1, 2, 2],
    "tokens": [0, 4, 0, 4],
    "context": [64, 64, 64, 64],
    "median_s": [0.001, 0.005, 0.002, 0.010],
    "mad_s": [None] * 4,
    "n": [1] * 4,
}


def test_written_and_read_again(tmp_path) -> None:
    profile = make_engine_profile()
    text = profile.to_yaml(tmp_path / "a.yaml")
    assert Profile.from_yaml(tmp_path / "a.yaml").to_yaml() == text
    assert profile_file_name(profile) == "qwen3-8b.bfloat16.vllm.tp1.yaml"


@pytest.mark.parametrize(
    "changed", [{"version": "0.33.0"}, {"compilation": "vllm_compile"}, {"graphs": "full"},
                {"executor": "uni"}, {"max_num_seqs": 4}]
)  # fmt: skip
def test_the_engine_is_a_hard_key(tmp_path, changed) -> None:
    profile = make_engine_profile()
    store = ProfileStore([tmp_path])
    store.save(profile)
    assert store.find(profile.key).profile.key == profile.key
    runtime = RuntimeSection(**RUNTIME, engine=ENGINE.model_copy(update=changed))
    other = profile.model_copy(update={"runtime": runtime})
    with pytest.raises(ProfileError):
        store.find(other.key)


def test_the_engine_belongs_to_its_runtime() -> None:
    for kind, engine in (("eager", ENGINE), ("vllm", None)):
        with pytest.raises(ValidationError, match="engine belongs to"):
            RuntimeSection(**(RUNTIME | {"kind": kind}), engine=engine)


def test_draft_costs_between_and_beyond_the_points() -> None:
    section = EngineDrafterSection(**GRID)
    assert section.seconds(2, 500, 1) == pytest.approx(0.003)
    assert section.seconds(4, 64, 1.5) == pytest.approx(0.0075)
    assert section.seconds(8, 64, 2) == pytest.approx(0.018)


@pytest.mark.parametrize(
    "wrong",
    [
        {name: values[:3] for name, values in GRID.items() if name != "name"},
        {"batch": [1, 2, 1, 2]},
        {"tokens": [0, 4, 0, 5]},
    ],
)
def test_draft_costs_must_be_a_full_ascending_grid(wrong: dict) -> None:
    with pytest.raises(ValidationError):
        EngineDrafterSection(**(GRID | wrong))
