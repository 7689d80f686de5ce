"""Calibrations run again and again: quiet, and beside another process.

    python -m lab.studies.repeated_calibrations [--runs 5] [--modes quiet quiet-avx2 beside ...]

Each run is the command `rooftree calibrate` in a process of its own. `-avx2` holds the CPU to
AVX2 without bfloat16 products. `beside` runs next to a process that is busy for a third of each
tenth of a second; its choices are judged at the times of the quiet runs of the same kind. Each
run is also judged at the times of the run before it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.calibration.base import Calibration
from costmodel.calibration.choices import regret_at_contexts
from costmodel.calibration.points import Points
from costmodel.profile.profile import Profile
from lab.studies.common import AVX2, environment, store

BUSY = """
import time
while True:
    end = time.perf_counter() + 1 / 30
    while time.perf_counter() < end:
        pass
    time.sleep(2 / 30)
"""
CONTEXTS = (64, 256, 1024, 2048)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--modes", nargs="*", default=["quiet", "beside", "quiet-avx2",
                        "beside-avx2"])  # fmt: skip
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = {mode: repeated(mode, options.runs, Path(folder)) for mode in options.modes}
    rows = {mode: summary(runs, made) for mode, runs in made.items()}
    store("repeated_calibrations", {"environment": environment(), **rows})


def repeated(mode: str, runs: int, folder: Path) -> list[tuple[float, Profile]]:
    """Wall seconds and profile of each run."""
    beside = [subprocess.Popen([sys.executable, "-c", BUSY])] if "beside" in mode else []
    made = []
    try:
        for number in range(runs):
            output = folder / f"{mode}-{number}.yaml"
            start_s = time.perf_counter()
            subprocess.run(
                [sys.executable, "-m", "rooftree", "calibrate", "--output", str(output)],
                env=os.environ | (AVX2 if "avx2" in mode else {}), check=True,
            )  # fmt: skip
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
        others = {"before": runs[number - 1 : number]} | {
            "quiet": made.get(quiet, []) if runs is not made.get(quiet) else []
        }
        rows.append(
            {
                "wall_s": round(wall_s, 1),
                "points": profile.provenance.points,
                "samples": profile.provenance.samples,
                "regret": profile.regret.model_dump(include={"mean", "worst", "interval"}),
                "held_out_median": profile.held_out.error.median,
                "repeat_noise": profile.held_out.repeat_noise,
                "selected": profile.calibration.selected,
            }
            | {f"at_{name}": judged(profile, truths) for name, truths in others.items() if truths}
        )
    return rows


def judged(profile: Profile, truths: Sequence[tuple[float, Profile]]) -> dict[str, float]:
    """Mean and worst regret at the times of other profiles, each by its own calibration."""
    most = max(profile.held_out.rows)
    regrets = [
        regret_of(profile.verify_calibration(), truth.verify_calibration(), most)
        for _, truth in truths
    ]
    means, worsts = zip(*regrets, strict=True)
    return {"mean": float(np.mean(means)), "worst": float(np.mean(worsts))}


def regret_of(chosen: Calibration, truth: Calibration, most_rows: int) -> tuple[float, float]:
    """Mean and worst regret of choices among all row counts at the grid's contexts."""
    rows, contexts = (grid.ravel() for grid in np.meshgrid(np.arange(1, most_rows + 1), CONTEXTS))
    points = Points(rows=rows, context=contexts, seconds=truth.predict_s(rows, contexts))
    regret = regret_at_contexts(points, chosen.predict_s(rows, contexts))
    return regret.mean, regret.worst


if __name__ == "__main__":
    main()
