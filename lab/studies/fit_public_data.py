"""Errors of all calibrations on published forward times, from 24 self-chosen points each.

    python -m lab.studies.fit_public_data [--points 24] [--name fit_public_data]

The four sets lie beside the checkout (../shared/data, see its SOURCES.md). They are sums of the
operator profiles of casys-kaist/LLMServingSim (MIT), with contexts of 64 to 8192 and up to 1024
rows. Where the LM head was measured up to 256 rows only, the whole forward ends there, and
attention and linear layers up to 1024 rows make a separate set. Errors are of all points that
were not chosen, every row count with equal weight. All sets use the same options.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

from costmodel.calibration.points import Points
from costmodel.catalog import find_device, find_target
from costmodel.communication import protocols_of
from costmodel.roofline import Roofline
from lab.studies.common import environment, store
from profiler.report.fits import chosen, cross_validated

DATA = Path(__file__).parents[3] / "shared" / "data" / "forward_latency"
TARGET = "meta-llama/Llama-3.1-8B-Instruct"
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=24)
    parser.add_argument("--name", default="fit_public_data")
    options = parser.parse_args()
    results = []
    for name, device, tensor_parallel, columns in SETS:
        points = read_set(DATA / f"{name}.csv", columns)
        roofline = Roofline(
            architecture=find_target(TARGET).architecture,
            peaks=find_device(device).peaks,
            tensor_parallel=tensor_parallel,
            protocols=protocols_of(device, tensor_parallel),
        )
        report = {
            "set": name,
            "time": " + ".join(columns),
            "points": len(points),
            "most_rows": int(points.rows.max()),
            "chosen_points": chosen(points, roofline, options.points),
            "all_points": cross_validated(points, roofline),
        }
        results.append(report)
        print_set(report)
    store(options.name, {"environment": environment(), "target": TARGET, "sets": results})


def read_set(path: Path, columns: tuple[str, ...]) -> Points:
    """The forwards of one file at 64 <= context <= 8192 and up to 1024 rows."""
    if not path.is_file():
        raise SystemExit(f"{path} is not here: this benchmark needs the published sets")
    with path.open(newline="", encoding="utf-8") as stream:
        table = [
            (
                int(row["new_tokens"]),
                int(row["context_tokens"]),
                sum(float(row[c]) for c in columns),
            )
            for row in csv.DictReader(stream)
            if all(row[column] for column in columns)
        ]
    in_range = [entry for entry in table if 64 <= entry[1] <= 8192 and entry[0] <= 1024]
    rows, context, micros = zip(*in_range, strict=True)
    return Points(rows=rows, context=context, seconds=[value * 1e-6 for value in micros])


def print_set(report: dict[str, Any]) -> None:
    fitted = report["chosen_points"]
    print(f"{report['set']} ({report['time']}, up to {report['most_rows']} rows)")
    for name, calibration in fitted["calibrations"].items():
        held_out = calibration["held_out"]
        unseen = held_out.get("rows_never_fitted")
        print(
            f"  {name:10s} mean {held_out['mape']:.2%} p95 {held_out['p95']:.2%}"
            f" regret {held_out['regret']:.3%} worst {held_out['regret_worst']:.2%}"
            + (
                f" rows never fitted ({unseen['row_counts']}): {unseen['mape']:.2%}"
                if unseen
                else ""
            )
            + (" selected" if name == fitted["selected"] else "")
        )


if __name__ == "__main__":
    main()
