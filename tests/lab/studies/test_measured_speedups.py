"""Planned against measured speedups, on a made-up benchmark and a profile of constant steps."""

from __future__ import annotations

import dataclasses

import pytest

from costmodel.errors import InputError
from costmodel.planning.drafting import NGRAM_S
from lab.bench.record import Model, Result
from lab.studies.measured_speedups import (
    compare,
    cycle_times,
    default_arms,
    halves,
    mean_errors,
    planned_speedup,
)
from tests.profiler.fake_bench import arm, prompt, response, result, rounds
from tests.profiler.made_profile import make_profile

STEP_S = 5e-3  # of every forward of the made-up profile
PROFILE = make_profile()


def tree_s(nodes: int) -> float:
    """What the planner takes for an n-gram draft and for its tree, where nobody timed them."""
    return NGRAM_S + 5e-6 + 5e-8 * nodes


ARMS = [
    arm("plain"),
    arm("chain+ngram", drafter="ngram"),
    arm("fixed:8+ngram", drafter="ngram", nodes=8),
    arm("bastion+ngram", drafter="ngram"),
]
PROMPTS = [prompt(name, name[0], tokens=100) for name in ("a1", "a2", "a3", "b1", "b2")]
# Nodes and accepted tokens of an arm's rounds for each prompt: 9 tokens after the first.
ROUNDS = {
    "chain+ngram": ([4, 0, 4], [4, 0, 2]),
    "fixed:8+ngram": ([8, 8, 8], [3, 2, 1]),
    "bastion+ngram": ([16, 0], [7, 0]),
}


def made(**changed) -> Result:
    """Plain: 9 tokens in 0.09 s; arms take 0.03 s for prompts ending in 1 or 3, else 0.045 s."""
    responses = []
    for one in PROMPTS:
        responses.append(response("plain", one.id, 10, 0.09))
        for name, (nodes, accepted) in ROUNDS.items():
            decode_s = 0.045 if one.id.endswith("2") else 0.03
            own = rounds(nodes, accepted, depths=[max(n, 0) for n in nodes])
            responses.append(response(name, one.id, 10, decode_s, rounds=own))
    usual = {"target": Model(name="Qwen3", hash=PROFILE.target.architecture_hash)}
    return result(ARMS, PROMPTS, responses, **usual | changed)


def test_every_set_is_in_both_halves():
    one, other = halves(made())
    assert one == {"a1", "a3", "b1"} and other == {"a2", "b2"}


@pytest.mark.parametrize("name", list(ROUNDS))
def test_plans_come_from_rounds_and_profile_alone(name):
    """9 plain steps of 5 ms over the rounds' forwards and trees, whatever the clock said."""
    found, nodes = made(), ROUNDS[name][0]
    planned = planned_speedup(
        found.of(name), {one.id: one.tokens for one in PROMPTS}, cycle_times(PROFILE, "ngram")
    )
    cycles_s = sum(STEP_S + (tree_s(n) if n else 0.0) for n in nodes)
    assert planned == pytest.approx(9 * STEP_S / cycles_s, rel=1e-9)


def test_each_half_is_planned_from_the_other():
    """Measured: 3x where prompts end in 1 or 3, else 2x; the plan does not know it."""
    rows = compare(made(), PROFILE, ["fixed:8+ngram"])
    planned = 9 * STEP_S / (3 * (STEP_S + tree_s(8)))
    assert [row["measured"] for row in rows] == [pytest.approx(2.0), pytest.approx(3.0)]
    assert [row["prompts_planned_from"] for row in rows] == [3, 2]
    for row in rows:
        assert row["planned"] == pytest.approx(planned, abs=1e-4)
        assert row["error"] == pytest.approx(planned / row["measured"] - 1, abs=1e-4)
        assert "best_fixed_planned" not in row
    errors = [abs(planned / measured - 1) for measured in (2.0, 3.0)]
    assert mean_errors(rows) == {"fixed:8+ngram": pytest.approx(sum(errors) / 2, abs=1e-4)}


def test_rounds_of_the_scored_half_are_not_read():
    """Other rounds on the second half change only what is planned for the first."""
    found = made()
    other = rounds([1] * 9, [0] * 9)
    changed = tuple(
        dataclasses.replace(one, rounds=other)
        if one.prompt in ("a2", "b2") and one.arm == "bastion+ngram"
        else one
        for one in found.responses
    )
    before, after = (
        compare(data, PROFILE, ["bastion+ngram"])
        for data in (found, dataclasses.replace(found, responses=changed))
    )
    assert before[0]["planned"] == after[0]["planned"]
    assert before[0]["cost_error"] == before[0]["error"]  # both halves had the same rounds
    assert after[0]["cost_error"] == pytest.approx(after[1]["planned"] / 2.0 - 1, abs=1e-4)
    assert after[1]["planned"] == pytest.approx(STEP_S / (STEP_S + tree_s(1)), abs=1e-4)


def test_the_sweep_is_named_beside_an_adaptive_arm():
    row = compare(made(), PROFILE, ["bastion+ngram"])[0]
    assert row["best_fixed_nodes"] == 8
    assert row["best_fixed_planned"] == pytest.approx(
        9 * STEP_S / (3 * (STEP_S + tree_s(8))), abs=1e-4
    )


def test_the_arms_that_are_compared_by_themselves():
    assert default_arms(made()) == ["chain+ngram", "fixed:8+ngram", "bastion+ngram"]


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(InputError, match="the profile is of"):
        compare(made(target=Model(name="other", hash="x" * 16)), PROFILE, ["bastion+ngram"])
    with pytest.raises(InputError, match="does not tell its rounds"):
        compare(made(), PROFILE, ["plain"])
    with pytest.raises(InputError, match="there is no arm"):
        compare(made(), PROFILE, ["beam"])
