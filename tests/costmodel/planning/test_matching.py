"""Acceptance belongs to a target, a drafter and a policy; a name means a timed drafter."""

import json

import pytest

from costmodel.errors import InputError
from costmodel.planning.acceptance import OTHER_TARGET_SPREAD, find_acceptance
from costmodel.planning.drafting import (
    NGRAM_S,
    acceptance_for,
    block_drafter,
    find_drafter,
    lookup_drafter,
)
from costmodel.planning.forwards import TargetForward
from costmodel.planning.request import ServingPolicy
from costmodel.planning.search import plan
from costmodel.profile.schema import DrafterSection
from tests.costmodel.planning.conftest import asked
from tests.profiler.made_profile import make_profile

NAME = "Qwen/Qwen3-8B"
QWEN = make_profile().target.architecture
CHAIN = {"by_depth": [0.6, 0.5, 0.5], "rounds": 500}
FROM_BENCH = {"target": NAME, "target_hash": QWEN.hash, "drafter": "ngram", "policy": "chain",
              "drafter_kind": "ngram"}  # fmt: skip


@pytest.fixture(autouse=True)
def no_own_profiles(tmp_path, monkeypatch):
    monkeypatch.setenv("ROOFTREE_HOME", str(tmp_path / "home"))


@pytest.fixture
def read(tmp_path):
    def acceptance(**data):
        path = tmp_path / "found.json"
        said = {name: value for name, value in (CHAIN | data).items() if value is not None}
        path.write_text(json.dumps({"acceptance": said}))
        return find_acceptance(str(path), NAME)

    return acceptance


def test_a_file_says_what_it_is_of_and_its_drafter_is_planned(read, tmp_path):
    assert read(**FROM_BENCH).measured.drafter == "ngram"
    assert read().measured.policy == "chain"
    assert read(by_depth=None, nodes=[0, 4], committed=[1, 2]).measured.policy == "fixed"
    with pytest.raises(InputError, match="target must be a text"):
        read(target=3)
    read(**FROM_BENCH)
    found = plan(asked(acceptance=str(tmp_path / "found.json")))
    assert found.best.drafter.name == "ngram"


@pytest.mark.parametrize(("data", "drafter", "doubt"), [
    (FROM_BENCH, lookup_drafter(), None),
    (FROM_BENCH | {"target": "me/my-tune"}, lookup_drafter(), "my-tune"),
    (FROM_BENCH | {"drafter": "demo", "drafter_kind": "dflash"}, block_drafter(), "demo"),
    ({}, block_drafter(), "does not say"),
])  # fmt: skip
def test_what_differs_a_little_is_doubted(read, data, drafter, doubt):
    found = acceptance_for(read(**data), (NAME, QWEN), drafter, trees=False)
    assert any(doubt in said for said in found.doubts) if doubt else found.doubts == ()
    if doubt == "my-tune":
        assert found.spread >= OTHER_TARGET_SPREAD
    rate = find_acceptance("0.6", NAME)
    assert acceptance_for(rate, (NAME, QWEN), drafter, trees=True).doubts == ()


def test_acceptance_of_another_target_or_drafter_is_refused(read):
    other = FROM_BENCH | {"target": "HuggingFaceTB/SmolLM2-135M-Instruct", "target_hash": "abc"}
    for data in (other, {k: v for k, v in other.items() if k != "target_hash"}):
        with pytest.raises(InputError, match="SmolLM2-135M-Instruct, not of Qwen/Qwen3-8B") as no:
            acceptance_for(read(**data), (NAME, QWEN), lookup_drafter(), trees=False)
        command = "rooftree bench --target Qwen/Qwen3-8B --drafter ngram --output FILE"
        assert no.value.hint == f"Measure it: `{command}`"
    for name, drafter in ((NAME, "z-lab/Qwen3-8B-DFlash-b16"), ("me/my-tune", "FOLDER")):
        with pytest.raises(InputError, match="of the drafter ngram, not of dflash") as refused:
            acceptance_for(read(**FROM_BENCH), (name, QWEN), block_drafter(), trees=False)
        command = f"`rooftree bench --target {name} --drafter {drafter} --output FILE`"
        assert command in refused.value.hint
    with pytest.raises(InputError, match="of the drafter dflash, not of ngram"):
        plan(asked(acceptance="gsm8k", drafter="ngram"))


def test_trees_say_little_of_chains_and_chains_model_trees(read):
    trees = read(
        **FROM_BENCH | {"policy": "fixed", "by_depth": None}, nodes=[0, 9], committed=[1, 3]
    )
    with pytest.raises(InputError, match="only chains are planned"):
        acceptance_for(trees, (NAME, QWEN), lookup_drafter(), trees=False)
    assert acceptance_for(trees, (NAME, QWEN), lookup_drafter(), trees=True).doubts == ()
    chains = acceptance_for(read(**FROM_BENCH), (NAME, QWEN), lookup_drafter(), trees=True)
    assert any("modelled from the chains" in doubt for doubt in chains.doubts)


def test_ngrams_cost_their_look_up_and_drafts_of_unknown_cost_are_refused():
    """Of one request, 0.18 ms of host work a cycle in an engine that does not overlap it."""
    old = {"drafter": "ngram", "engine_version": "0.11"}
    found = plan(asked(acceptance="0.6", policy=ServingPolicy(kind="chain"), **old))
    first = found.best.choices[0].chain
    assert first.parts.draft_s == pytest.approx(NGRAM_S)
    with pytest.raises(InputError, match="no drafter is called 'medusa'") as raised:
        plan(asked(acceptance="0.6", drafter="medusa"))
    command = "`rooftree calibrate --target Qwen/Qwen3-8B --drafter FOLDER`"
    assert command in raised.value.hint


@pytest.mark.parametrize(("name", "found"), [
    ("abc", "ngram+dflash"), ("ngram+dflash", "ngram+dflash"), ("fed", "dflash@block=4"),
    ("dflash", "dflash@block=4"),
])  # fmt: skip
def test_a_hash_or_part_of_a_name_will_do(name, found) -> None:
    times = {"context": [256], "median_s": [1e-3], "mad_s": [1e-5], "n": [5]}
    names = {"abc": "ngram+dflash", "fed": "dflash@block=4"}
    timed = {key: DrafterSection(name=one, **times) for key, one in names.items()}
    steps = TargetForward(make_profile().model_copy(update={"drafters": timed}))
    drafter = find_drafter(steps, name)
    assert drafter.timed is not None and drafter.name == found
    assert find_drafter(steps, "ngram") == lookup_drafter()
    with pytest.raises(InputError, match="dflash@block=4"):
        find_drafter(steps, "medusa")
