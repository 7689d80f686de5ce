"""`rooftree demo-model` and its side-by-side comparison."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from decoder.demo_model import FILES
from profiler import cli, demo


def test_the_folder_is_printed_alone_on_stdout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in FILES:
        (tmp_path / name).write_text("{}")
    assert cli.run(["demo-model", "--output", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"
    assert cli.run(["demo-model", "--output", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"folder": str(tmp_path), "comparison": None}


def test_another_folder_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").write_text("important")
    assert cli.run(["demo-model", "--output", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert "is not the demo model" in captured.err


def test_pooled_rates_are_tokens_over_seconds() -> None:
    # 10 tokens in 1 s and 10 in 4 s are 20 in 5 s = 4 a second, not the mean of 10 and 2.5.
    def row(seconds: float, rounds: int, same: bool) -> dict[str, object]:
        return {
            "same_tokens": same,
            "rounds": rounds,
            "plain": {"tokens": 10, "seconds": 2 * seconds},
            "tree": {"tokens": 10, "seconds": seconds},
        }

    pooled = demo._pooled([row(1.0, 4, True), row(4.0, 6, False)])
    assert pooled["tree_tokens_per_s"] == pytest.approx(4.0)
    assert pooled["plain_tokens_per_s"] == pytest.approx(2.0)
    assert pooled["speedup"] == pytest.approx(2.0)
    assert pooled["tokens_per_verification"] == pytest.approx(2.0)
    assert pooled["same_tokens"] is False


@pytest.mark.slow
def test_the_comparison_on_the_real_model(
    smollm2_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ROOFTREE_HOME", str(tmp_path))
    monkeypatch.setattr(demo, "NEW_TOKENS", 12)
    monkeypatch.setattr(demo, "PROMPTS", {"count": "Count: 1, 2, 3,", "say": "Say hello."})
    said: list[str] = []
    comparison = demo.compare(smollm2_folder, say=said.append)
    assert json.loads(json.dumps(comparison)) == comparison
    assert [row["name"] for row in comparison["prompts"]] == ["count", "say"]
    for row in [*comparison["prompts"], comparison["pooled"]]:
        assert row["tokens_per_verification"] >= 1.0
        assert row["speedup"] == row["tree_tokens_per_s"] / row["plain_tokens_per_s"]
    assert said[-1] == "decoding 2 of 2: say"
    demo.print_comparison(comparison)
    page = capsys.readouterr().out
    assert "> Say hello." in page
    table = [line.split() for line in page.splitlines()]
    assert [row[0] for row in table if row and row[-1] in ("yes", "no")] == ["count", "say", "all"]
