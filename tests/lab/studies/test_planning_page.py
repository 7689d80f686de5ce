"""docs/planning.md and the stored comparison with published speedups are those of this code."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from lab.studies import plan_speedups
from lab.studies.plan_speedups import MEASURED, planned
from lab.studies.readme import PLAN, PLANNING, with_output


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
