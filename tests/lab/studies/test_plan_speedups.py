"""The stored comparison with published speedups is that of the code as it is."""

import json
from pathlib import Path

import numpy as np
import pytest

from lab.studies import plan_speedups
from lab.studies.plan_speedups import MEASURED, planned


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
