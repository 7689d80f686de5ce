"""`rooftree demo-model` and its side-by-side comparison."""

import json
import shutil
from types import SimpleNamespace
from typing import Any

import pytest

from decoder.model.demo_model import FILES, demo_model_folder
from profiler import demo
from tests.tiny_folder import isolate

pytestmark = pytest.mark.cpu_kind


def test_the_folder_is_printed_alone_on_stdout(run, refused):
    folder = demo_model_folder()  # in a data directory of one's own
    folder.mkdir(parents=True)
    (folder / "thesis.txt").write_text("important")
    assert "is not the demo model" in refused("demo-model")
    for name in FILES:
        (folder / name).write_text("{}")
    assert run("demo-model")[:2] == (0, f"{folder}\n")
    assert json.loads(run("demo-model", "--json")[1]) == {
        "schema_version": 1, "folder": str(folder), "comparison": None,
    }  # fmt: skip


def counts(tokens: int, seconds: float, rounds: int) -> dict[str, Any]:
    return {"tokens": tokens, "seconds": seconds, "rounds": rounds}


def row(name: str, same: bool, *arms: tuple[int, float, int]) -> dict[str, Any]:
    """One prompt's row, by the counts of each policy's arm."""
    own = {policy: counts(*arm) for policy, arm in zip(demo.POLICIES, arms, strict=True)}
    return {"name": name, "prompt": "", "text": "", "same_tokens": same, "arms": demo._rates(own)}


def test_pooled_rates_are_tokens_over_seconds():
    # Plain: 40 tokens in 5 s = 8 a second, not the mean of 5 and 10.
    rows = [  # of plain, chain, fixed and bastion
        row("slow", True, (10, 2.0, 10), (10, 1.0, 5), (10, 4.0, 4), (10, 1.0, 4)),
        row("fast", False, (30, 3.0, 30), (30, 4.0, 10), (30, 1.0, 6), (30, 1.5, 6)),
    ]
    pooled = demo._pooled(rows)
    assert pooled["same_tokens"] is False
    assert pooled["arms"]["plain"] == counts(40, 5.0, 40) | {
        "tokens_per_s": 8.0, "speedup": 1.0, "tokens_per_verification": 1.0,
    }  # fmt: skip
    assert {policy: own["speedup"] for policy, own in pooled["arms"].items()} == {
        "plain": 1.0, "chain": 1.0, "fixed:15": 1.0, "bastion": 2.0,
    }  # fmt: skip
    assert pooled["arms"]["chain"]["tokens_per_verification"] == pytest.approx(40 / 15)
    assert pooled["arms"]["bastion"]["tokens_per_verification"] == 4.0


def test_the_comparison(tmp_path, tiny_target, monkeypatch, capsys):
    """Of a tiny model, which the trained drafter does not fit; the README's runs the real one."""
    monkeypatch.setattr(demo, "DRAFTER", "ngram")
    isolate(monkeypatch, tmp_path)
    target = shutil.copytree(tiny_target, tmp_path / "tiny")
    (target / "chat_template.jinja").write_text("{{ messages[0].content }}")
    monkeypatch.setattr(demo, "NEW_TOKENS", (12, 12))
    monkeypatch.setattr(demo, "PROMPTS", {"count": "Count: 1, 2, 3,", "say": "Say hello."})
    said: list[str] = []
    comparison = demo.compare(target, say=said.append)
    assert json.loads(json.dumps(comparison)) == comparison
    assert comparison["drafter"] == "ngram"
    assert [row["name"] for row in comparison["prompts"]] == ["count", "say"]
    for row in [*comparison["prompts"], comparison["pooled"]]:
        arms = row["arms"]
        assert list(arms) == list(demo.POLICIES)
        assert arms["plain"]["rounds"] == arms["plain"]["tokens"]
        for own in arms.values():
            assert own["tokens_per_verification"] >= 1.0
            assert own["speedup"] == pytest.approx(
                own["tokens_per_s"] / arms["plain"]["tokens_per_s"]
            )
    assert said[-1] == "decoding 2 of 2: say"
    demo.print_comparison(comparison)
    page = capsys.readouterr().out
    assert "> Say hello." in page
    table = [line.split() for line in page.splitlines()]
    assert [row[0] for row in table if row and row[-1] in ("yes", "no")] == ["count", "say", "all"]


@pytest.mark.parametrize(("token_s", "tokens"), [(0.01, 96), (0.06, 50), (1.0, 32)])
def test_a_slow_machine_decodes_shorter_texts(token_s, tokens):
    stats = SimpleNamespace(decode_s=7 * token_s, new_tokens=8)
    plain = SimpleNamespace(generate=lambda *_, **__: SimpleNamespace(stats=stats))
    assert demo._planned_tokens(plain) == tokens
