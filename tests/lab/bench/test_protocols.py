"""Protocols of papers: prompts as the authors' code words and orders them, and filled tables."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from costmodel.errors import InputError
from lab.bench.protocols import Changes, plan_run
from lab.bench.record import ProtocolUse
from lab.bench.report.published import paper_table
from lab.papers.protocols import find_protocol, find_set, take_sample
from tests.lab.bench.made_bench import arm, prompt, response, result, rounds


def write(folder: Path, name: str, records: list[dict]) -> None:
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def sample(protocol: str, name: str, folder: Path, records: list[dict], most: int | None = None):
    chosen = find_protocol(protocol)
    one = next(one for one in chosen.sets if one.name == name)
    write(folder, name, records)
    return take_sample(chosen, one, find_set(folder, one), most)


def turns(*given) -> list[tuple[str, ...]]:
    return list(sample(*given).turns)


BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@pytest.mark.parametrize(("protocol", "name", "record", "asked"), [
    ("bastion", "gsm8k", {"question": "How many {x}?"}, "How many {x}?" + BOXED),
    ("ddtree", "math500", {"problem": "1+1", "answer": "2"}, "1+1" + BOXED),
    ("blockpilot", "aime24", {"prompt": "a bare text"}, "a bare text" + BOXED),
    (
        "ddtree", "humaneval", {"prompt": "def f():"},
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        "```python\ndef f():\n```",
    ),
    ("specblock", "humaneval", {"prompt": "def f():"}, "def f():"),
    ("ddtree", "alpaca", {"instruction": "Do.", "input": "x"}, "Do.\n\nInput:\nx"),
    ("bastion", "alpaca", {"instruction": "Do.", "input": "x"}, "Do.\n\nx"),
    ("specblock", "alpaca", {"instruction": "Do.", "input": ""}, "Do."),
    (
        "specblock", "wmt23", {"de-en": {"de": "Ja.", "en": "Yes."}},
        "Translate the following German text to English:\n\nJa.",
    ),
    ("bastion:longbench", "qasper", {"context": "C", "input": "Q"}, "C\n\nQ"),
    ("dynatree", "pg19", {"text": " " + "b" * 1200}, "b" * 1000),
])  # fmt: skip
def test_wording(protocol, name, record, asked, tmp_path) -> None:
    assert turns(protocol, name, tmp_path, [record]) == [(asked,)]


def test_more_wording(tmp_path) -> None:
    """Turns of a chat; starter code; paragraphs of WikiText up to blank lines and headings."""
    two = {"turns": ["First?", "Second?"]}
    assert turns("bastion", "mt-bench", tmp_path, [two]) == [("First?", "Second?")]
    starter = {"question_content": "Q", "starter_code": "S"}
    ((code,),) = turns("ddtree", "livecodebench", tmp_path, [starter])
    layout = "### Question:\nQ\n\n### Format: Use the following code structure:\n```python\nS\n```"
    assert layout in code
    lines = [" = Head = ", " " + "a" * 150, " " + "b" * 700, "", " short", "", " " + "c" * 250]
    found = turns("dynatree", "wikitext2", tmp_path, [{"text": line} for line in lines])
    assert [len(text) for (text,) in found] == [800, 257]
    assert found[0][0].startswith("a" * 150 + "  b") and "short  ccc" in found[1][0]


def test_number_and_order_of_samples(tmp_path) -> None:
    def places(protocol: str, name: str, count: int, most: int | None = None) -> list[int]:
        records = [dict.fromkeys(("prompt", "question", "instruction"), "x") for _ in range(count)]
        return list(sample(protocol, name, tmp_path, records, most).places)

    theirs = np.random.default_rng(0).permutation(1319)[:128].tolist()
    assert places("ddtree", "gsm8k", 1319) == theirs
    assert places("ddtree", "gsm8k", 1319, 2) == theirs[:2]
    assert places("ddtree", "gsm8k", 128) == list(range(128))
    assert places("bastion", "gsm8k", 1319) == list(range(1319))
    shuffled = list(range(300))
    random.Random(0).shuffle(shuffled)
    assert places("bastion", "alpaca", 300) == shuffled[:128]
    assert places("specblock", "alpaca", 5000) == list(range(4000))


def test_published_files_of_a_set(tmp_path) -> None:
    """Parquet, and of a folder the files of the set's split."""
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    chosen = find_protocol("ddtree")
    one = next(one for one in chosen.sets if one.name == "mbpp")
    for split in ("train", "test"):
        (tmp_path / "mbpp" / "sanitized").mkdir(parents=True, exist_ok=True)
        file = tmp_path / "mbpp" / "sanitized" / f"{split}-00000-of-00001.parquet"
        parquet.write_table(pyarrow.table({"prompt": [split], "task_id": [1]}), file)
    assert list(take_sample(chosen, one, find_set(tmp_path, one)).turns) == [("test",)]


def test_what_is_missing_and_what_differs_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("lab.bench.protocols.weights_source", lambda name, download: None)
    protocol = find_protocol("blockpilot:2")
    with pytest.raises(InputError, match=r"blockpilot:2 cannot run: .*: gsm8k \(question\), "):
        plan_run(protocol, Changes(data=tmp_path))
    write(tmp_path, "gsm8k", [{"question": f"{place}"} for place in range(9)])
    run = plan_run(protocol, Changes(data=tmp_path, new_tokens=32, drafters=("pilot=./mine",)))
    sets = f"no set in {tmp_path.name}: math500 (problem), aime24 (problem), humaneval (prompt), "
    models = "Qwen/Qwen3-4B, AngelSlim/Qwen3-4B_eagle3, z-lab/Qwen3-4B-DFlash-b16"
    assert run.lacks.startswith(sets) and run.lacks.endswith(f"to be fetched: {models}")
    assert "dflash@block=4" not in run.models and run.models["pilot"] == "./mine"
    assert "chain@z-lab/Qwen3-4B-DFlash-b16@block=4" in run.arms.policies
    assert "chain@./mine" in run.arms.policies
    assert "new tokens: 32, not 2048" in run.differs
    assert "gsm8k: 8 of 9 prompts, not 8 of 1319" in run.differs
    other = plan_run(protocol, Changes(data=tmp_path, target="./small", drafters=("./d",)))
    assert "BlockPilot: no drafter; give one by --drafter pilot=NAME" in other.missing
    assert "target: ./small, not Qwen/Qwen3-4B" in other.differs
    assert {method.name for method in other.methods} == {f"DFlash({n})" for n in (4, 8, 16, 32)}
    some = plan_run(protocol, Changes(data=tmp_path, policies=("chain@dflash@block=8", "fixed:59")))
    assert [method.name for method in some.methods] == ["EAGLE-3", "DFlash(8)"]
    with pytest.raises(InputError, match=r"no protocol 'ddtree:9'"):
        find_protocol("ddtree:9")


def test_a_table_by_hand() -> None:
    """DDTree's: mean seconds a token over means, tau by response, the best budget of the set."""
    base = "transformers:plain"
    names = ("plain", "chain+d", "fixed:16+d", "fixed:32+d")
    arms = [*(arm(name, drafter="d" if "+" in name else None) for name in names),
            arm(base, kind="peer", policy="plain")]  # fmt: skip
    seconds = {"plain": (5, 10), "chain+d": (2, 4), "fixed:16+d": (2.5, 5), "fixed:32+d": (1, 2),
               base: (10, 20)}  # fmt: skip
    accepted = {"chain+d": ((4, 4), (2,)), "fixed:16+d": ((1,), (1,)), "fixed:32+d": ((9,), (8, 7))}
    responses = [
        response(
            name, text, 11, spent_s[place],
            rounds=rounds([12] * len(accepted[name][place]), accepted[name][place])
            if name in accepted else None,
        )
        for name, spent_s in seconds.items() for place, text in enumerate(("a", "b"))
    ]  # fmt: skip
    prompts = [prompt("a", "gsm8k"), prompt("b", "gsm8k")]
    methods = {"DFlash": ("chain+d",), "DDTree": ("fixed:16+d", "fixed:32+d")}
    use = ProtocolUse(name="ddtree:1", row="Qwen/Qwen3-8B", arms=methods)
    table = paper_table(result(arms, prompts, responses, protocol=use))
    assert table is not None
    assert table.columns == ["set", "method", "over transformers", "over plain here",
                             "paper: speedup", "tau", "paper: tau"]  # fmt: skip
    assert table.rows == [
        ["gsm8k", "DFlash", "5.00", "2.50", "4.78", "4.00", "6.57"],  # (5 + 3) / 2
        ["gsm8k", "DDTree", "10.00", "5.00", "6.75", "9.25", "9.54"],  # (10 + 8.5) / 2
    ]
    assert paper_table(result(arms, prompts, responses)) is None


def test_dynatree_s_figures_by_hand() -> None:
    """Throughput with the prefill, path length over K or D + 2, means over prompts."""
    arms = [arm("plain"), arm("beam:1x8+d", policy="beam:1x8", drafter="d"),
            arm("transformers:plain", kind="peer", policy="plain")]  # fmt: skip
    spent_s = {"plain": 4.0, "beam:1x8+d": 1.0, "transformers:plain": 9.0}
    found = {"beam:1x8+d": rounds([8, 8], [5, 3])}
    pairs = spent_s.items()
    responses = [response(name, "a", 10, spent, rounds=found.get(name)) for name, spent in pairs]
    methods = {"Linear Spec": ("beam:1x8+d",)}
    use = ProtocolUse(name="dynatree:1", row="EleutherAI/pythia-2.8b", arms=methods)
    table = paper_table(result(arms, [prompt("a", "wikitext2")], responses, protocol=use))
    assert table is not None
    linear = dict(zip(table.columns, table.rows[1], strict=True))
    assert linear | {
        "method": "Linear Spec", "tokens/s": "5.0", "paper: tokens/s": "196.1",
        "over transformers": "5.00", "over plain here": "2.50", "path length": "5.00",
        "acceptance %": "62.5", "rounds": "2.0", "tokens/round": "5.00", "first token ms": "1000.0",
    } == linear  # fmt: skip
    plain = dict(zip(table.columns, table.rows[0], strict=True))
    assert (plain["method"], plain["tokens/s"], plain["paper: tokens/s"]) == ("AR", "1.0", "133.4")
