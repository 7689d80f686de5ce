"""What is kept of a training, and the tables made of it."""

import json
import sys

import pytest

from lab.studies import trained

HISTORY = [
    {"step": 200.0, "seconds": 60.0, "chain": 1.25, "tree": 1.5, "accepted_1": 0.3,
     "accepted_2": 0.05},
    {"step": 400.0, "seconds": 120.0, "chain": 2.5, "tree": 3.25, "accepted_1": 0.625,
     "accepted_2": 0.25},
]  # fmt: skip
PRINTED = {
    "kind": "dflash", "drafter": "/home/somebody/work/drafter", "texts": 1200, "held_out": 40,
    "tokens": 150000, "collecting": {"openings": "free"},
    "settings": {"steps": 400, "batch": 4, "learning_rate": 0.002},
    "last": HISTORY[-1], "history": HISTORY,
    "environment": {"device": "A CPU", "created_utc": "2026-01-02T03:04:05Z",
                    "fields": {"torch_version": "2.9"}},
}  # fmt: skip


@pytest.fixture
def stored(tmp_path, monkeypatch):
    monkeypatch.setattr(trained, "TRAINED", tmp_path / "trained.json")
    printed = tmp_path / "printed.json"

    def store(**runs: dict) -> dict:
        for name, run in runs.items():
            printed.write_text(json.dumps(run), encoding="utf-8")
            monkeypatch.setattr(sys, "argv", ["trained", f"{name}={printed}"])
            trained.main()
        return trained.runs()

    return store


def test_where_a_run_lay_is_not_kept_and_others_stay(stored):
    runs = stored(demo=PRINTED, other=PRINTED | {"texts": 7})
    assert set(runs) == {"demo", "other"}
    assert runs["demo"]["texts"] == 1200
    assert "somebody" not in json.dumps(runs)


def test_the_drafters_table_has_the_figures_of_the_run(stored):
    stored(demo=PRINTED)
    table = trained.demo_table()
    assert "1,200 texts (150,000 tokens written by the target, openings: free), 40 more" in table
    assert "400 steps of 4 texts, AdamW at 0.002, 2 minutes on one core of A CPU" in table
    assert "| 200 | 1.25 | 1.50 |\n| 400 | 2.50 | 3.25 |" in table
    assert table.endswith("| first i places right | 1 | 2 |\n|---|---|---|\n"
                          "| share of blocks | 62% | 25% |")  # fmt: skip
