"""The same engine measured over HTTP and from within: how far the two profiles are apart.

    python -m lab.studies.url_against_engine --vllm PYTHON --engine-profile FILE [--time-budget 90]

PYTHON is an interpreter that has vLLM, FILE a profile of `rooftree calibrate vllm` of the
same model, made on this machine with the same options, as

    PYTHON -m rooftree calibrate vllm --drafter none --engine-option enforce_eager=true \\
        --target FOLDER --max-nodes 15 --output FILE

The server is started here and stopped at the end. Each point measured over HTTP is compared with
what the engine's own profile says there, and with its measured point where it has the same.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from costmodel.calibration.points import ErrorSummary, Points
from costmodel.profile.profile import Profile
from decoder.model.demo_model import ensure_demo_model
from lab.studies.common import environment, store
from lab.studies.vllm_server import vllm_server
from profiler.calibrate.run import CalibrationListener, calibrate
from profiler.calibrate.source import CalibrationSettings
from profiler.calibrate.sources.url import UrlSource

SERVER_ARGUMENTS = (
    "--enforce-eager", "--enable-prefix-caching", "--disable-uvicorn-access-log",
    "--max-model-len", "2432", "--max-num-seqs", "8",
)  # fmt: skip
COLUMNS = ("rows", "context", "batch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", type=Path, required=True, help="interpreter that has vLLM")
    parser.add_argument("--engine-profile", type=Path, required=True)
    parser.add_argument("--model", help="folder [default: the demo model]")
    parser.add_argument("--time-budget", type=float, default=90.0)
    parser.add_argument("--name", default="url_against_engine")
    options = parser.parse_args()
    engine = Profile.from_yaml(options.engine_profile)
    if engine.device.threads is not None:
        torch.set_num_threads(engine.device.threads)  # of the server, which the peaks are taken for
    model = options.model or str(ensure_demo_model())
    with (
        tempfile.TemporaryDirectory() as folder,
        vllm_server(options.vllm, model, SERVER_ARGUMENTS, Path(folder) / "server.log") as (
            url,
            http_cores,
        ),
    ):
        settings = CalibrationSettings(
            target=model, device="cpu", dtype=engine.runtime.dtype,
            contexts=tuple(sorted(set(engine.surface.context))),
            max_nodes=max(engine.surface.rows) - 1,
            batches=tuple(sorted(set(engine.surface.batch))), time_budget_s=options.time_budget,
            output=Path(folder) / "served.yaml", fresh=True,
        )  # fmt: skip
        listener = CalibrationListener(say=print)
        served = calibrate(settings, listener, UrlSource(settings, url)).profile
    if served.target.architecture_hash != engine.target.architecture_hash:
        raise SystemExit(f"{options.engine_profile} is of {engine.target.name}")
    result = compared(served, engine)
    for name in ("measured_in_both", "against_the_fit", "plain_of_several_sequences"):
        print(name, result[name])
    store(
        options.name,
        {"environment": environment("cpu"), "http_cores": sorted(http_cores), **result},
    )


def compared(served: Profile, engine: Profile) -> dict[str, Any]:
    """The relative differences over all points measured over HTTP, and the points."""
    points, inside = served.surface.points(), engine.surface.points()
    measured_s = dict(zip(shapes_of(inside), inside.seconds, strict=True))
    shapes = shapes_of(points)
    fit_s = engine.verify_calibration().predict_s(points.rows, points.context, points.batch)
    both = np.array([shape in measured_s for shape in shapes])
    there_s = np.array([measured_s.get(shape, np.nan) for shape in shapes])
    return {
        "engine": engine.as_dict()["runtime"] | {"created_utc": engine.provenance.created_utc},
        "served": served.as_dict()["provenance"],
        "measured_in_both": difference(points.seconds[both], there_s[both]),
        "against_the_fit": difference(points.seconds, fit_s),
        "plain_of_several_sequences": difference(
            points.seconds[points.batch > 1], fit_s[points.batch > 1]
        ),
        "points": [
            dict(zip(COLUMNS, shape, strict=True))
            | {"served_s": float(points.seconds[i]), "engine_s": float(fit_s[i])}
            | {"engine_measured_s": float(there_s[i]) if both[i] else None}
            for i, shape in enumerate(shapes)
        ],
    }


def shapes_of(points: Points) -> list[tuple[int, ...]]:
    """(rows, context, batch) of each point."""
    return list(zip(*(getattr(points, name).tolist() for name in COLUMNS), strict=True))


def difference(served_s: np.ndarray, engine_s: np.ndarray) -> dict[str, float] | None:
    """Differences from the engine's times: median, 95th percentile, worst, and their sign."""
    if not len(served_s):
        return None
    error = ErrorSummary.of(served_s, engine_s)
    signed = float(np.mean(served_s / engine_s - 1.0))
    return {
        "points": len(served_s), "median": error.median, "p95": error.p95, "worst": error.worst,
        "mean_signed": signed,
    }  # fmt: skip


if __name__ == "__main__":
    main()
