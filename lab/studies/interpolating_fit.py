"""Stairs against surface: which calibration interpolates better, on four kinds of points.

    git show af4e17c:costmodel/calibration/surface.py > /tmp/surface.py
    python -m lab.studies.interpolating_fit --surface /tmp/surface.py

`surface` interpolated between the points as they are; it lost and was removed. Without
--surface its figures are left out.
- public: seven published tables (../shared/data, see its SOURCES.md), 24 points chosen by the
  design, errors on all others with equal weight for each row count;
- vllm: steps of a real vLLM on a CPU, left out in groups (random, row counts, contexts, batches);
- cpu: held-out points of a calibration of a CPU, left out in groups;
- shipped: every fifth composed or transferred profile, left out in groups; `points` compares
  each fit with the points it was fitted to, `plain` with the plain steps of 2 to 256 sequences.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.calibration.base import Calibration
from costmodel.calibration.design import design_points
from costmodel.calibration.physical import fit_physical
from costmodel.calibration.points import Points
from costmodel.calibration.selection import regret_at_contexts
from costmodel.calibration.stairs import fit_stairs
from costmodel.catalog import find_device, find_target, protocols_of
from costmodel.io import shipped_directory
from costmodel.profile.profile import Profile
from costmodel.profile.schema import SurfaceSection
from costmodel.roofline import Peaks, Roofline
from lab.studies.common import environment, store
from profiler.calibrate.imported import held_out_error

RESULTS = Path(__file__).parent / "results"
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
# Twice the peaks that the vLLM profile measured on one thread of the same processor.
CPU_PEAKS = Peaks(flops_per_s=8e11, bytes_per_s=7.4e10)
Fits = dict[str, Callable[[Points, Roofline], Calibration]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--surface", type=Path)
    parser.add_argument("--name", default="interpolating_fit")
    options = parser.parse_args()
    measured, exact = fits(options.surface, exact=False), fits(options.surface, exact=True)
    results: dict[str, Any] = {"public": [public_set(*entry, measured) for entry in SETS]}
    points, roofline = vllm_points()
    results["vllm"] = left_out(points, roofline, measured)
    held_out = json.loads((RESULTS / "held_out.json").read_text())["points"]
    columns = {name: [p[name] for p in held_out] for name in ("rows", "context", "batch")}
    points = Points(**columns, seconds=[p["measured_s"] for p in held_out])
    cpu = Roofline(architecture=roofline.architecture, peaks=CPU_PEAKS)
    results["cpu"] = left_out(points, cpu, measured)
    paths = sorted(shipped_directory().glob("*/*.yaml"))[::5]
    results["shipped"] = [shipped(path, exact) for path in paths]
    results["means"] = means(results)
    print(json.dumps(results["means"], indent=1))
    store(options.name, {"environment": environment(), **results})


def fits(surface: Path | None, *, exact: bool) -> Fits:
    """The fits by name."""
    tried: Fits = {
        "physical": fit_physical,
        "stairs": lambda p, roofline: fit_stairs(p, fit_physical(p, roofline), exact=exact),
    }
    if surface is not None:
        sys.path.append(str(surface.parent))
        module = importlib.import_module(surface.stem)
        tried["surface"] = lambda p, roofline: module.build_surface(p, roofline, module.EXACT)
    return tried


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


def public_set(name: str, device: str, tp: int, columns: tuple[str, ...], tried: Fits) -> Any:
    """Errors on one published table."""
    points = read_set(DATA / f"{name}.csv", columns)
    roofline = Roofline(
        architecture=find_target(LLAMA).architecture,
        peaks=find_device(device).peaks,
        tensor_parallel=tp,
        protocols=protocols_of(device, tp),
    )
    index = design_points(points, roofline, 24)
    left = ~np.isin(np.arange(len(points)), index)
    errors = {}
    for fit_name, fit in tried.items():
        fitted = fit(points.take(index), roofline)
        predicted_s = fitted.predict_s(points.rows, points.context, points.batch)
        errors[fit_name] = held_out_error(points, predicted_s, left)
    return {"set": name, "time": " + ".join(columns), "points": len(points), "errors": errors}


def vllm_points() -> tuple[Points, Roofline]:
    """The points of the stored vLLM profile."""
    data = json.loads((RESULTS / "vllm_profile.json").read_text())["profile"]
    linear = data["calibration"]["linear"]
    data["calibration"] = {"selected": "linear", "linear": linear}
    profile = Profile.model_validate(data)
    return SurfaceSection.model_validate(data["surface"]).points(), profile.roofline()


def left_out(points: Points, roofline: Roofline, tried: Fits) -> dict[str, Any]:
    """Errors and regret by what is left out of the fit, group by group."""
    order = np.random.default_rng(0).permutation(len(points))
    inner = {name: np.unique(getattr(points, name))[1:-1] for name in ("rows", "context", "batch")}
    groups = {
        "random": [np.isin(np.arange(len(points)), part) for part in np.array_split(order, 10)],
        "rows": [np.isin(points.rows, inner["rows"][start::2]) for start in (0, 1)],
        "contexts": [points.context == value for value in inner["context"]],
        "batches": [points.batch == value for value in inner["batch"]],
    }
    return {
        kind: {name: _errors(points, roofline, fit, parts) for name, fit in tried.items()}
        for kind, parts in groups.items()
        if parts
    }


def _errors(points: Points, roofline: Roofline, fit: Any, parts: list[Any]) -> dict[str, float]:
    predicted_s = points.seconds.copy()
    for part in parts:
        there = points.take(part)
        fitted = fit(points.take(~part), roofline)
        predicted_s[part] = fitted.predict_s(there.rows, there.context, there.batch)
    error = np.abs(predicted_s / points.seconds - 1)[np.any(parts, axis=0)]
    regret = regret_at_contexts(points, predicted_s)
    return {"mape": float(error.mean()), "p95": float(np.quantile(error, 0.95)),
            "regret": regret.mean, "regret_worst": regret.worst}  # fmt: skip


def shipped(path: Path, tried: Fits) -> dict[str, Any]:
    """Errors on the points of a shipped profile, and on its plain steps of several sequences."""
    profile = Profile.from_yaml(path)
    points, roofline, plain = profile.surface.points(), profile.roofline(), profile.stages.plain
    result: dict[str, Any] = {"profile": f"{path.parent.name}/{path.stem}"}
    result |= left_out(points, roofline, tried) | {"points": {}, "plain": {}}
    batch, context, plain_s = map(np.array, (plain.batch, plain.context, plain.median_s))
    for name, fit in tried.items():
        fitted = fit(points, roofline)
        at = fitted.predict_s(points.rows, points.context) / points.seconds - 1
        result["points"][name] = {"mape": np.mean(np.abs(at)), "worst": np.max(np.abs(at))}
        error = np.abs(fitted.predict_s(1, context, batch) / plain_s - 1)[batch > 1]
        if len(error):
            result["plain"][name] = {"mape": np.mean(error), "worst": np.max(error)}
    return result


def means(results: dict[str, Any]) -> dict[str, Any]:
    """Mean of each figure over the sets and over the shipped profiles."""
    public = [entry["errors"] for entry in results["public"]]
    kinds = [kind for kind in results["shipped"][0] if kind != "profile"]
    tables = {kind: [e[kind] for e in results["shipped"] if e[kind]] for kind in kinds}
    return {
        kind: {
            name: {
                figure: float(np.mean([entry[name][figure] for entry in entries]))
                for figure in ("mape", "p95", "worst", "regret", "regret_worst")
                if figure in entries[0][name]
            }
            for name in entries[0]
        }
        for kind, entries in {"public": public, **tables}.items()
    }


if __name__ == "__main__":
    main()
