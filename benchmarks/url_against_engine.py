"""The same engine measured over HTTP and from within: how far the two profiles are apart.

    python -m benchmarks.url_against_engine --vllm PYTHON --engine-profile FILE [--time-budget 90]

PYTHON is an interpreter that has vLLM, FILE a profile of `rooftree calibrate --engine vllm` of the
same model, made on this machine with the same options, as

    PYTHON -m rooftree calibrate --engine vllm --drafter none --engine-option enforce_eager=true \\
        --target FOLDER --max-nodes 15 --output FILE

The server is started here and stopped at the end. Each point measured over HTTP is compared with
what the engine's own profile says there, and with its measured point where it has the same.
"""

from __future__ import annotations

import argparse
import http.client
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import environment, store
from costmodel.calibration.points import ErrorSummary, Points
from costmodel.profile.profile import Profile
from decoder.target.demo_model import ensure_demo_model
from profiler.calibrate.calibrate import CalibrationListener, CalibrationSettings
from profiler.calibrate.served.calibration import ServerSettings, calibrate_server

START_S = 180.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", required=True, help="interpreter that has vLLM")
    parser.add_argument("--engine-profile", type=Path, required=True)
    parser.add_argument("--model", help="folder [default: the demo model]")
    parser.add_argument("--time-budget", type=float, default=90.0)
    parser.add_argument("--name", default="url_against_engine")
    options = parser.parse_args()
    engine = Profile.from_yaml(options.engine_profile)
    if engine.device.threads is not None:
        torch.set_num_threads(engine.device.threads)  # of the server, which the peaks are taken for
    model = options.model or str(ensure_demo_model())
    with tempfile.TemporaryDirectory() as folder, serving(options.vllm, model) as url:
        settings = CalibrationSettings(
            target=model,
            device="cpu",
            dtype=engine.runtime.dtype,
            contexts=tuple(sorted(set(engine.surface.context))),
            max_nodes=max(engine.surface.rows) - 1,
            batches=tuple(sorted(set(engine.surface.batch))),
            time_budget_s=options.time_budget,
            output=Path(folder) / "served.yaml",
            fresh=True,
        )
        listener = CalibrationListener(say=print)
        served = calibrate_server(settings, ServerSettings(url=url), listener).profile
    if served.target.architecture_hash != engine.target.architecture_hash:
        raise SystemExit(f"{options.engine_profile} is of {engine.target.name}")
    result = compared(served, engine)
    for name in ("measured_in_both", "against_the_fit", "plain_of_several_sequences"):
        print(name, result[name])
    store(options.name, {"environment": environment("cpu"), **result})


@contextmanager
def serving(python: str, model: str) -> Iterator[str]:
    """A vLLM server on a free port of this machine while the body runs; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    usual = {"VLLM_CPU_KVCACHE_SPACE": "2"}
    openmp = Path(python).parents[1] / "lib" / "libiomp5.so"
    if openmp.is_file():
        usual["LD_PRELOAD"] = str(openmp)
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", model,
        "--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--enable-prefix-caching",
        "--max-model-len", "2432", "--max-num-seqs", "8", "--disable-uvicorn-access-log",
    ]  # fmt: skip
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=usual | os.environ
        )
        try:
            wait_for(port, process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_for(port: int, process: subprocess.Popen[bytes], log: Any) -> None:
    """Return when the server is ready; SystemExit with the end of its log where it never is."""
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == http.client.OK:
                return
        except OSError:
            pass
        time.sleep(0.5)
    log.seek(0)
    raise SystemExit(f"vLLM did not start:\n{log.read()[-3000:]}")


def compared(served: Profile, engine: Profile) -> dict[str, Any]:
    """The differences over all points measured over HTTP, and by rows."""
    points, own = served.surface.points(), engine.surface.points()
    fit_s = engine.verify_calibration().predict_s(points.rows, points.context, points.batch)
    several = points.batch > 1
    rows = [
        {
            "rows": int(points.rows[i]),
            "context": int(points.context[i]),
            "batch": int(points.batch[i]),
            "served_s": float(points.seconds[i]),
            "engine_s": float(fit_s[i]),
            "engine_measured_s": same_point(own, points, i),
        }
        for i in range(len(points))
    ]
    both = [row for row in rows if row["engine_measured_s"] is not None]
    return {
        "engine": engine.as_dict()["runtime"] | {"created_utc": engine.provenance.created_utc},
        "served": served.as_dict()["provenance"],
        "measured_in_both": difference(both, "engine_measured_s"),
        "against_the_fit": difference(rows, "engine_s"),
        "plain_of_several_sequences": difference(
            [row for row, more in zip(rows, several, strict=True) if more], "engine_s"
        ),
        "points": rows,
    }


def same_point(own: Points, points: Points, i: int) -> float | None:
    """The engine's own measured seconds at the i-th point; None where it has no such point."""
    same = (own.rows == points.rows[i]) & (own.context == points.context[i])
    same &= own.batch == points.batch[i]
    return float(own.seconds[same][0]) if np.any(same) else None


def difference(rows: list[dict[str, Any]], of: str) -> dict[str, float] | None:
    """The relative differences from the engine's times: median, 95th percentile, and their sign."""
    if not rows:
        return None
    served_s, engine_s = ([row[name] for row in rows] for name in ("served_s", of))
    error = ErrorSummary.of(served_s, engine_s)
    return {
        "points": len(rows),
        "median": error.median,
        "p95": error.p95,
        "worst": error.worst,
        "mean_signed": float(np.mean(np.divide(served_s, engine_s) - 1.0)),
    }


if __name__ == "__main__":
    main()
