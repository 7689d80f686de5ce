"""Three calibrations by two processes, one after another; run by test_ranks.

`python -m tests.profiler.calibrating_ranks FOLDER`: of a target that two cannot share, of one
that they can, and of the same where the second process fails in the middle. Writes the exit
codes of the first two to FOLDER/rank<r>.json, and ends with that of the third.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from costmodel.errors import MeasurementError
from decoder.model.target import Target
from profiler import cli
from profiler.calibrate.instruments import Instruments
from profiler.calibrate.workload import Task, Workload
from profiler.measure.stopping import NoiseRule
from tests.fake_timing import FakeTimer
from tests.tiny_folder import isolate

RANK = int(os.environ.get("RANK", "0"))
SLOWEST_S = 2e-3  # of the second process, which is the slower one
TOO_LARGE = 16  # rows that the second process has no memory for


class DisturbedAtTimes:
    """A guard that now and then rejects a sample, in the second process alone."""

    def __init__(self) -> None:
        self.samples = 0

    def start(self) -> None:
        self.samples += 1

    def disturbance(self) -> str:
        return "a busy neighbour" if RANK == 1 and self.samples % 5 == 0 else ""

    def summary(self) -> dict[str, Any]:
        return {}


def instruments(device: torch.device) -> Instruments:
    """A clock that runs differently in each process, so that each would decide differently."""
    random = np.random.default_rng(RANK)

    def duration_s(call: object) -> float:
        return SLOWEST_S * (1.0 + RANK + 0.02 * random.random()) / 2

    rule = NoiseRule(min_samples=3, max_samples=8, settle_samples=5)
    return Instruments(timer=FakeTimer(duration_s), guard=DisturbedAtTimes(), rule=rule)


def without_room(patch: pytest.MonkeyPatch) -> None:
    """The second process runs out of memory in forwards of some rows."""
    verify = Target.verify

    def limited(target: Target, steps: list[Any]) -> Any:
        if RANK == 1 and steps[0].tree.rows == TOO_LARGE:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return verify(target, steps)

    patch.setattr(Target, "verify", limited)


def failing(patch: pytest.MonkeyPatch) -> None:
    """The second process fails while the first is in a forward, waiting for it."""
    call = Workload.call

    def broken(workload: Workload, task: Task) -> Any:
        work, calls = call(workload, task), []

        def run() -> object:
            calls.append(task)
            if RANK == 1 and task.kind == "verify" and len(calls) == 3:
                time.sleep(0.5)
                raise MeasurementError("the second device is broken")
            return work()

        return run

    patch.setattr(Workload, "call", broken)


def main() -> None:
    folder = Path(sys.argv[1])
    patch = pytest.MonkeyPatch()
    isolate(patch, folder)
    patch.setattr("profiler.calibrate.calibrate.instruments", instruments)

    def calibrate(target: str, *more: str) -> int:
        return cli.run([
            "calibrate", "--target", str(folder / target), "--device", "cpu", "--dtype",
            "float32", "--contexts", "32,128", "--max-nodes", "15", *more,
        ])  # fmt: skip

    codes = [calibrate("uneven")]
    with patch.context() as short:
        without_room(short)
        codes.append(calibrate("tiny", "--json"))
    (folder / f"rank{RANK}.json").write_text(json.dumps(codes))
    sys.stderr.write(f"rank {RANK} goes on\n")
    failing(patch)
    sys.exit(calibrate("tiny", "--output", str(folder / "failed" / "profile.yaml")))


if __name__ == "__main__":
    main()
