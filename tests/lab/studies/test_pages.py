"""Numbers and plans of the pages, and of shipped calibrations, are those of stored results."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from lab.studies import plan_speedups
from lab.studies.plan_speedups import MEASURED, planned
from lab.studies.readme import BLOCK, PAGES, PLAN, PLANNING, with_numbers, with_output
from lab.studies.shipped import ROOT, SHIPPED, document, recipes


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_numbers_are_those_of_the_stored_results(page):
    text = page.read_text(encoding="utf-8")
    assert BLOCK.search(text)
    assert with_numbers(text) == text


def test_the_page_of_shipped_calibrations_is_up_to_date():
    assert (ROOT / "docs" / "calibrations.md").read_text(encoding="utf-8") == document()


def test_every_shipped_file_has_a_command_and_every_command_a_file():
    made = [path for path in SHIPPED.glob("*/*.yaml") if "kind: measured" not in path.read_text()]
    names = [path.relative_to(SHIPPED).as_posix() for path in made]
    assert sorted(recipe.path for recipe in recipes()) == sorted(names)


@pytest.mark.slow
def test_stored_plans_are_those_of_today():
    path = Path(plan_speedups.__file__).parent / "results" / "plan_speedups.json"
    rows = {(row["target"], row["shape"]): row for row in json.loads(path.read_text())["rows"]}
    assert set(rows) == set(MEASURED)
    for (target, shape), row in rows.items():
        error = np.array(row["planned"]) / np.array(row["measured"]) - 1
        assert row["mean_error"] == pytest.approx(np.mean(np.abs(error)), abs=1e-3)
        assert row["mean_error"] < (0.1 if shape == "chain" else 0.2)
        assert planned(target, "gsm8k", shape) == pytest.approx(row["planned"][0], rel=0.01)


@pytest.mark.slow
def test_output_is_what_the_commands_print():
    text = PLANNING.read_text(encoding="utf-8")
    assert len(PLAN.findall(text)) >= 3
    assert with_output(text) == text


@pytest.mark.slow
def test_the_python_example_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("ROOFTREE_HOME", str(tmp_path))
    block = re.search(r"```python\n(.*?)```", PLANNING.read_text(encoding="utf-8"), re.DOTALL)[1]
    exec(compile(block, "planning.md", "exec"), {})
    gpu, count = capsys.readouterr().out.split()
    assert gpu in ("h100-sxm", "l40s") and int(count) >= 1
