"""The interpolating calibration on published tables: 24 points by the design, errors on the rest.

    python -m lab.studies.interpolating_fit

Seven tables (../shared/data, see its SOURCES.md), with equal weight for each row count.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.calibration.design import design_points
from costmodel.calibration.physical import fit_physical
from costmodel.calibration.points import Points
from costmodel.calibration.stairs import fit_stairs
from costmodel.catalog import find_device, find_target, protocols_of
from costmodel.roofline import Roofline
from lab.studies.common import environment, store
from profiler.calibrate.imported import held_out_error

DATA = Path(__file__).parents[3] / "shared" / "data" / "forward_latency"
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
WHOLE, LAYERS = ("forward_us",), ("attention_us", "linear_us")
SETS = (
    ("rtx-a6000_llama-3.1-8b_tp1", "rtx-a6000", 1, WHOLE),
    ("rtx4090_llama-3.1-8b_tp1", "rtx-4090", 1, WHOLE),
    ("rtxpro6000-server_llama-3.1-8b_tp1", "rtx-pro-6000-server", 1, WHOLE),
    ("rtxpro6000-server_llama-3.1-8b_tp2", "rtx-pro-6000-server", 2, WHOLE),
    ("rtx4090_llama-3.1-8b_tp1", "rtx-4090", 1, LAYERS),
    ("rtxpro6000-server_llama-3.1-8b_tp1", "rtx-pro-6000-server", 1, LAYERS),
    ("rtxpro6000-server_llama-3.1-8b_tp2", "rtx-pro-6000-server", 2, LAYERS),
)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    public = [public_set(*entry) for entry in SETS]
    for entry in public:
        print(entry["set"], entry["time"], entry["errors"])
    store("interpolating_fit", {"environment": environment(), "public": public})


def read_set(path: Path, columns: tuple[str, ...]) -> Points:
    """The forwards of one published table at 64 <= context <= 8192 and up to 1024 rows."""
    with path.open(newline="", encoding="utf-8") as stream:
        lines = [line for line in csv.DictReader(stream) if all(line[c] for c in columns)]
    table = np.array(
        [[int(x["new_tokens"]), int(x["context_tokens"]), *(float(x[c]) for c in columns)]
         for x in lines]
    ).T  # fmt: skip
    table = table[:, (table[1] >= 64) & (table[1] <= 8192) & (table[0] <= 1024)]
    return Points(rows=table[0], context=table[1], seconds=table[2:].sum(axis=0) * 1e-6)


def public_set(name: str, device: str, tp: int, columns: tuple[str, ...]) -> dict[str, Any]:
    """Errors on one published table."""
    points = read_set(DATA / f"{name}.csv", columns)
    roofline = Roofline(
        architecture=find_target(LLAMA).architecture,
        peaks=find_device(device).peaks,
        tensor_parallel=tp,
        protocols=protocols_of(device, tp),
    )
    index = design_points(points, roofline, 24)
    left, chosen = ~np.isin(np.arange(len(points)), index), points.take(index)
    physical = fit_physical(chosen, roofline)
    errors = {
        name: held_out_error(points, fit.predict_s(points.rows, points.context, points.batch), left)
        for name, fit in {"physical": physical, "stairs": fit_stairs(chosen, physical)}.items()
    }
    return {"set": name, "time": " + ".join(columns), "points": len(points), "errors": errors}


if __name__ == "__main__":
    main()
