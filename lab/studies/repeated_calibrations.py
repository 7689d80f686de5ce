"""Calibrations run again and again: quiet, and beside another process.

    python -m lab.studies.repeated_calibrations [--runs 5] [--modes "quiet beside"]

Each run is a process of its own. `-avx2` holds the CPU to AVX2 without bfloat16 products. `beside`
runs next to a process that is busy for a third of the time, and is judged at quiet times too.
Each run is also judged at the times of the run before it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.calibration.choices import regret_at_contexts
from costmodel.calibration.points import Points
from costmodel.profile.profile import Profile
from lab.studies.common import AVX2, RESULTS, environment, store

BUSY = """
from time import *
while sleep(2 / 30) is None:
    end_s = perf_counter() + 1 / 30
    while perf_counter() < end_s: pass
"""
CONTEXTS = (64, 256, 1024, 2048)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--modes", default="quiet beside quiet-avx2 beside-avx2")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = {mode: repeated(mode, options.runs, Path(folder)) for mode in options.modes.split()}
    path = RESULTS / "repeated_calibrations.json"
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    seen = environment()
    rows = {m: {"environment": seen, "runs": summary(runs, made)} for m, runs in made.items()}
    store("repeated_calibrations", stored | rows)  # modes that did not run stay as they were


def repeated(mode: str, runs: int, folder: Path) -> list[tuple[float, Profile]]:
    beside = [subprocess.Popen([sys.executable, "-c", BUSY])] if "beside" in mode else []
    made = []
    try:
        for number in range(runs):
            output = folder / f"{mode}-{number}.yaml"
            start_s = time.perf_counter()
            command = [sys.executable, "-m", "rooftree", "calibrate", "--output", str(output)]
            subprocess.run(command, env=os.environ | (AVX2 if "avx2" in mode else {}))
            made.append((time.perf_counter() - start_s, Profile.from_yaml(output)))
    finally:
        for process in beside:
            process.kill()
    return made


def summary(
    runs: Sequence[tuple[float, Profile]], made: dict[str, list[tuple[float, Profile]]]
) -> list[dict[str, Any]]:
    """A row for each run: as printed, and judged at the times of the run before and quiet ones."""
    quiet = "quiet-avx2" if runs[0][1].device.instruction_set == "avx2" else "quiet"
    rows = []
    for number, (wall_s, profile) in enumerate(runs):
        others = {"before": runs[number - 1 : number]}
        others |= {"quiet": made.get(quiet, []) if runs is not made.get(quiet) else []}
        row = {"wall_s": round(wall_s, 1), "samples": profile.provenance.samples}
        row |= {"points": profile.provenance.points, "selected": profile.calibration.selected}
        row["regret"] = profile.regret.model_dump(include={"mean", "worst", "interval"})
        row |= {f"at_{name}": judged(profile, truths) for name, truths in others.items() if truths}
        rows.append(row | {"held_out_median": profile.held_out.error.median})
    return rows


def judged(profile: Profile, truths: Sequence[tuple[float, Profile]]) -> dict[str, float]:
    """Mean and worst regret at the times of other profiles, each by its own calibration."""
    sizes = np.arange(1, max(profile.held_out.rows) + 1)
    rows, contexts = (grid.ravel() for grid in np.meshgrid(sizes, CONTEXTS))
    predicted_s, regrets = profile.verify_calibration().predict_s(rows, contexts), []
    for _, truth in truths:
        seconds = truth.verify_calibration().predict_s(rows, contexts)
        points = Points(rows=rows, context=contexts, seconds=seconds)
        regrets.append(regret_at_contexts(points, predicted_s))
    return {name: float(np.mean([getattr(r, name) for r in regrets])) for name in ("mean", "worst")}


if __name__ == "__main__":
    main()
