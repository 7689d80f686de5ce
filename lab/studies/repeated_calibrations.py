"""Calibrations run again and again: quiet, beside another process, and replayed from a slow CPU.

    python -m lab.studies.repeated_calibrations [--runs 5] [--modes quiet quiet-avx2 beside ...]
    python -m lab.studies.repeated_calibrations --replay ../shared/data/calibrations_avx2

Each run is the command `rooftree calibrate` in a process of its own. `-avx2` holds the CPU to
AVX2 without bfloat16 products. `beside` runs next to a process that is busy for a third of each
tenth of a second; its choices are judged at the times of the quiet runs of the same kind. Each
run is also judged at the times of the run before it.

A replay runs the same sweep on a machine that is made of samples stored elsewhere: a fit of all
of them gives the cost of a forward, and their residuals, in the order they were taken, the pace.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.calibration.base import Calibration
from costmodel.calibration.choices import likely_regret, regret_at_contexts
from costmodel.calibration.points import Points
from costmodel.calibration.selection import select_calibration
from costmodel.profile.profile import Profile
from lab.studies.common import RESULTS, environment, store
from profiler.calibrate.points import AdaptiveGrid, SweepPlan
from profiler.calibrate.sections import points_of
from profiler.calibrate.sweep import SweepControl, Task, run_sweep
from profiler.measure.instruments import Guard, Instruments, WallTimer
from profiler.measure.journal import Journal
from profiler.measure.samples import NoiseRule

AVX2 = {"ROOFTREE_CPU": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
BUSY = """
import time
while True:
    end = time.perf_counter() + 1 / 30
    while time.perf_counter() < end:
        pass
    time.sleep(2 / 30)
"""
CONTEXTS = (64, 256, 1024, 2048)
REPLAY_LIMIT_S = 60.0
NAME = "repeated_calibrations"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--modes", nargs="*", default=["quiet", "beside", "quiet-avx2",
                        "beside-avx2"])  # fmt: skip
    parser.add_argument("--replay", type=Path)
    options = parser.parse_args()
    path = RESULTS / f"{NAME}.json"
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if options.replay is not None:
        stored["replayed"] = [replayed(options.replay, start) for start in range(options.runs)]
    else:
        stored["environment"] = environment()
        with tempfile.TemporaryDirectory() as folder:
            made = {mode: repeated(mode, options.runs, Path(folder)) for mode in options.modes}
        stored |= {mode: summary(runs, made) for mode, runs in made.items()}
    store(NAME, stored)


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


class Replay(WallTimer):
    """A clock and work of stored samples: a forward's cost times the pace of that moment."""

    def __init__(self, cost_s: Callable[[Task], float], pace: Sequence[tuple[float, float]],
                 start_s: float) -> None:  # fmt: skip
        self._cost_s, (times_s, paces) = cost_s, np.array(pace).T
        self._times_s, self._paces, self._now_s = times_s, paces, start_s

    def now_s(self) -> float:
        return self._now_s

    def time_s(self, function: Any) -> float:
        place = np.searchsorted(self._times_s, self._now_s % self._times_s[-1])
        seconds = self._cost_s(function.task) * float(self._paces[place])
        self._now_s += seconds
        return seconds

    def shortfall(self, task: Task) -> str:
        return ""

    def call(self, task: Task) -> Callable[[], object]:
        def work() -> None:
            """Nothing: the time of the task is what counts."""

        work.task = task  # type: ignore[attr-defined]
        return work


def replayed(folder: Path, number: int) -> dict[str, Any]:
    """The regret of one sweep over stored samples, begun at another moment each time."""
    profile = Profile.from_yaml(folder / "quiet_long.yaml")
    roofline = profile.roofline("physical")
    lines = (folder / "quiet_long.samples.jsonl").read_text(encoding="utf-8").splitlines()[1:]
    records = [json.loads(line) for line in lines]
    truth = profile.verify_calibration()
    at_s = np.cumsum([record["seconds"] for record in records])
    pace = [
        (when, record["seconds"] / float(truth.predict_s(record["size"], record["context"])))
        for when, record in zip(at_s, records, strict=True)
        if record["kind"] in ("verify", "held_out") and not record["disturbance"]
    ]
    replay = Replay(
        lambda task: float(truth.predict_s(task.size, task.context)), pace, 45.0 * number
    )
    plan = SweepPlan(contexts=CONTEXTS, max_nodes=127)
    grid = AdaptiveGrid(plan.grid(), roofline, plan.held_out)
    with tempfile.TemporaryDirectory() as temporary:
        swept = run_sweep(
            grid.first(), replay, Instruments(timer=replay, guard=Guard(), rule=NoiseRule()),
            Journal(Path(temporary) / "replay.jsonl", {}),
            SweepControl(limit_s=REPLAY_LIMIT_S, more=grid.more, again=grid.again),
        )  # fmt: skip
    points, held_out = points_of(swept, "verify"), points_of(swept, "held_out")
    selection = select_calibration(points, roofline)
    estimated = likely_regret(
        held_out, selection.calibration.predict_s(held_out.rows, held_out.context)
    )
    mean, worst = regret_of(selection.calibration, truth, int(held_out.rows.max()))
    return {
        "seconds": swept.spent_s, "points": len(points),
        "samples": int(points.n.sum() + held_out.n.sum()),
        "most_rows": int(held_out.rows.max()), "selected": selection.selected,
        "regret": {"mean": mean, "worst": worst},
        "told": {"mean": estimated.mean, "worst": estimated.worst, "interval": estimated.interval},
    }  # fmt: skip


if __name__ == "__main__":
    main()
