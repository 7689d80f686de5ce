"""Held-out error of a stored profile: fresh measurements at points drawn beforehand.

    python -m lab.studies.held_out [--contexts 4] [--rows 8] [--time-budget 60]

Points are log-uniform in rows (one draw in each stratum) and in context, from a seed that the
calibration does not use. The calibration measured none of these contexts and few of these row
counts. Stores errors, decision regret and the repeat-to-repeat noise.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.calibration.choices import regret_at_contexts
from costmodel.calibration.points import ErrorSummary
from costmodel.profile.store import ProfileStore
from decoder.device import default_dtype, select_device
from decoder.drafters.ngram import NgramDrafter
from decoder.model.loading import default_target, load_model
from decoder.model.making import make_target
from decoder.profiling.measured_profile import profile_key
from lab.studies.common import environment, store
from profiler.calibrate.decoder import Workload
from profiler.calibrate.points import DecoderPoints
from profiler.calibrate.sections import points_of
from profiler.calibrate.sweep import SweepControl, run_sweep
from profiler.measure.instruments import instruments
from profiler.measure.journal import Journal

SEED = 20261


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target")
    parser.add_argument("--device")
    parser.add_argument("--contexts", type=int, default=4)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--time-budget", type=float, default=60.0)
    parser.add_argument("--name", default="held_out")
    options = parser.parse_args()
    device = select_device(options.device)
    name = options.target or default_target(device)
    target = make_target(load_model(name, dtype=default_dtype(device), device=device))
    profile = ProfileStore().find(profile_key(target)).profile
    contexts = sorted(set(profile.surface.context))
    plan = DecoderPoints(
        contexts=tuple(contexts), max_nodes=max(profile.held_out.rows) - 1,
        held_out_contexts=options.contexts, held_out_rows=options.rows, seed=SEED,
    )  # fmt: skip
    workload = Workload(target, NgramDrafter(), capacity=plan.capacity, seed=SEED)
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "held_out.jsonl", {"seed": SEED})
        swept = run_sweep(
            plan.held_out(plan.max_nodes + 1), workload, instruments(device), journal,
            SweepControl(limit_s=options.time_budget),
        )  # fmt: skip
    store(options.name, summary(profile, points_of(swept, "held_out")))


def summary(profile: Any, points: Any) -> dict[str, Any]:
    """Errors and regret of the selected and of the linear calibration."""
    result: dict[str, Any] = {
        "environment": environment(),
        "profile": profile.as_dict()["provenance"],
        "selected": profile.calibration.selected,
        "repeat_noise": float(np.median(points.median_error)),
        "linear_rmse_reduction": 1
        - profile.calibration.linear.rmse_after_s / profile.calibration.linear.rmse_before_s,
    }
    calibrations = {
        "selected_calibration": profile.verify_calibration(),
        "linear_calibration": profile.linear_calibration(),
    }
    for label, calibration in calibrations.items():
        predicted_s = calibration.predict_s(points.rows, points.context, points.batch)
        error = ErrorSummary.of(predicted_s, points.seconds)
        regret = regret_at_contexts(points, predicted_s)
        result[label] = {
            "median_error": error.median, "mean_error": error.mape, "worst_error": error.worst,
            "regret_mean": regret.mean, "regret_worst": regret.worst,
        }  # fmt: skip
    predicted_s = profile.verify_calibration().predict_s(points.rows, points.context, points.batch)
    columns = {"rows": points.rows.astype(int), "context": points.context.astype(int)}
    columns |= {"batch": points.batch.astype(int), "measured_s": points.seconds}
    lists = [column.tolist() for column in (*columns.values(), predicted_s)]
    names = [*columns, "predicted_s"]
    result["points"] = [dict(zip(names, row, strict=True)) for row in zip(*lists, strict=True)]
    return result


if __name__ == "__main__":
    main()
