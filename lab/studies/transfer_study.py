"""Errors of transfers between devices: every pair at hand, each device left out in turn.

    python -m lab.studies.transfer_study [--shared ../shared]

Each composed profile is scaled to every other device that has one of the same target, and compared
with it there. The RTX 4090 and its pairs are measured forwards (casys-kaist/LLMServingSim, MIT),
not composed ones. The fixed time a layer is the one of least mean error over all composed pairs.
Leaving a device out: the fixed time and the errors that `transfer_errors` would expect come from
the pairs without it, and are compared with the errors to and from it. The errors go to
calibrations/transfers.yaml, everything else to lab/studies/results/transfer_study.json.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from costmodel.calibration.points import Points
from costmodel.catalog import find_device, find_target
from costmodel.compose.transfer import LEAST_ERROR, TransferErrors, scaled_points, transfer_errors
from costmodel.io import shipped_directory, write_atomic
from costmodel.profile.profile import Profile
from costmodel.roofline import Roofline
from lab.studies.common import environment, store

Pair = tuple[str, str]
TARGET = find_target("meta-llama/Llama-3.1-8B-Instruct").architecture
MAX_ROWS, MAX_CONTEXT = 256, 16384
FIXED_US = tuple(range(0, 105, 5))
# Measured sets by device; every pair with the RTX 4090 is taken from them.
MEASURED = {
    "rtx-4090": "rtx4090",
    "rtx-pro-6000-server": "rtxpro6000-server",
    "rtx-a6000": "rtx-a6000",
}
ONLY_MEASURED = "rtx-4090"
# Least other chips that a device needs in the study for a deviation of its own.
LEAST_CHIPS = 4
# An error bar is a mean absolute error; 80 % of normal errors lie below this many of them.
COVERED = 1.606


def read_set(path: Path) -> dict[str, np.ndarray]:
    """Columns of a set of measured forwards; NaN where empty. Microseconds."""
    with path.open(encoding="utf-8", newline="") as stream:
        lines = list(csv.DictReader(stream))
    return {
        name: np.array([float(line[name]) if line[name] else np.nan for line in lines])
        for name in lines[0]
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """One target on two devices: mean relative errors of the transfer, by fixed time a layer."""

    pair: Pair
    errors: Mapping[int, float]


def make_case(
    pair: Pair, rooflines: tuple[Roofline, Roofline], source: Points, measured_s: np.ndarray
) -> Case:
    """The errors of transfers of the source's points against the device's times at the same."""
    errors = {}
    for fixed_us in FIXED_US:
        moved = scaled_points(source, *rooflines, fixed_s_per_layer=1e-6 * fixed_us)
        errors[fixed_us] = float(np.mean(np.abs(moved.seconds / measured_s - 1)))
    return Case(pair=pair, errors=errors)


def composed_cases(folder: Path) -> list[Case]:
    """Every pair of composed profiles of one target."""
    profiles = [Profile.from_yaml(path) for path in sorted(folder.glob("*/*.yaml"))]
    composed = [profile for profile in profiles if profile.provenance.kind == "composed"]
    return [
        _case(source, other)
        for source in composed
        for other in composed
        if source is not other and source.target.architecture_hash == other.target.architecture_hash
    ]


def _case(source: Profile, other: Profile) -> Case:
    points, there = source.surface.points().sorted(), other.surface.points().sorted()
    here = (points.rows <= MAX_ROWS) & (points.context <= MAX_CONTEXT)
    return make_case(
        (source.device.slug, other.device.slug),
        (source.roofline("physical"), other.roofline("physical")),
        points.take(here),
        there.seconds[here],
    )


def measured_cases(folder: Path) -> list[Case]:
    """Every pair of measured sets with the device that has no composed profile."""
    sets = {slug: _measured(folder, slug) for slug in MEASURED}
    return [
        _measured_case(sets, (source, other))
        for source in sets
        for other in sets
        if source != other and ONLY_MEASURED in (source, other)
    ]


def _measured(folder: Path, slug: str) -> Points:
    columns = read_set(folder / f"{MEASURED[slug]}_llama-3.1-8b_tp1.csv")
    rows, context = columns["new_tokens"], columns["context_tokens"]
    if slug == "rtx-a6000":  # its cached length counts the chunk
        context = np.where(rows > 1, context - rows, context)
    seconds = 1e-6 * columns["forward_us"]
    here = np.isfinite(seconds) & (rows <= MAX_ROWS) & (context <= MAX_CONTEXT)
    return Points(rows=rows[here], context=context[here], seconds=seconds[here])


def _measured_case(sets: Mapping[str, Points], pair: Pair) -> Case:
    """The second set's points at row counts of the first, which is interpolated over context."""
    source, other = (sets[slug] for slug in pair)
    places, times, truth = [], [], []
    for rows, context, seconds in zip(other.rows, other.context, other.seconds, strict=True):
        same = source.take(source.rows == rows).sorted() if rows in source.rows else None
        if same is None or not same.context[0] <= context <= same.context[-1]:
            continue
        places.append((rows, context))
        times.append(float(np.interp(context, same.context, same.seconds)))
        truth.append(seconds)
    columns = np.array(places).T
    return make_case(
        pair,
        (_roofline(pair[0]), _roofline(pair[1])),
        Points(rows=columns[0], context=columns[1], seconds=times),
        np.array(truth),
    )


def _roofline(slug: str) -> Roofline:
    return Roofline(architecture=TARGET, peaks=find_device(slug).peaks, count="physical")


def best_fixed_us(cases: Iterable[Case]) -> int:
    """The fixed time of least mean error."""
    chosen = list(cases)
    return min(FIXED_US, key=lambda us: float(np.mean([case.errors[us] for case in chosen])))


def pair_errors(cases: Iterable[Case], fixed_us: int) -> dict[Pair, float]:
    """The mean error of each pair over its targets."""
    errors: dict[Pair, list[float]] = {}
    for case in cases:
        errors.setdefault(case.pair, []).append(case.errors[fixed_us])
    return {pair: round(float(np.mean(values)), 3) for pair, values in sorted(errors.items())}


def mean_and_worst(pairs: Mapping[Pair, float]) -> dict[str, float]:
    errors = np.array(list(pairs.values()))
    return {"mean": round(float(errors.mean()), 4), "worst": round(float(errors.max()), 4)}


def fit_deviations(
    pairs: Mapping[Pair, float], chips: Mapping[str, tuple[str, str]]
) -> dict[str, float]:
    """The deviation of each device, whose squares add up to those of the pairs' errors.

    By least squares relative to the errors. Pairs with fewer than LEAST_CHIPS other chips say too
    little of a device, which takes the largest deviation.
    """
    devices = sorted({slug for pair in pairs for slug in pair})
    weights = [1 / max(error, LEAST_ERROR) for error in pairs.values()]
    design = [[float(slug in pair) for slug in devices] for pair in pairs]
    squares = [error**2 for error in pairs.values()]
    fitted, _ = nnls(
        np.array(design) * np.array(weights)[:, None], np.array(squares) * np.array(weights)
    )
    few = set()
    for slug in devices:
        partners = {other for pair in pairs if slug in pair for other in pair}
        if len({chips[other][1] for other in partners - {slug}}) < LEAST_CHIPS:
            few.add(slug)
    return {
        slug: round(float(np.sqrt(max(fitted) if slug in few else square)), 3)
        for slug, square in zip(devices, fitted, strict=True)
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Errors to and from a device, and what the pairs without it would have said of them."""

    fixed_us: int
    actual: Mapping[Pair, float]
    expected: Mapping[Pair, float]

    @property
    def shares(self) -> np.ndarray:
        """Actual over expected errors [pairs]."""
        return np.array([self.actual[pair] / self.expected[pair] for pair in self.actual])

    def record(self) -> dict[str, Any]:
        """The figures that are stored."""
        actual, expected = (list(errors.values()) for errors in (self.actual, self.expected))
        return {
            "fixed_us_per_layer": self.fixed_us, "pairs": len(actual),
            "error": round(float(np.mean(actual)), 4), "worst": round(max(actual), 4),
            "expected": round(float(np.mean(expected)), 4),
            "covered": round(float(np.mean(self.shares <= COVERED)), 3),
        }  # fmt: skip


def left_out(composed: list[Case], cases: list[Case], study: TransferErrors) -> dict[str, LeftOut]:
    """Every device in turn."""
    result = {}
    for device in sorted({slug for case in cases for slug in case.pair}):
        fixed_us = best_fixed_us(case for case in composed if device not in case.pair)
        rest = [case for case in cases if device not in case.pair]
        pairs = pair_errors(rest, fixed_us)
        deviations = fit_deviations(pairs, study.chips)
        known = dataclasses.replace(study, pairs=pairs, deviations=deviations)
        actual = pair_errors([case for case in cases if device in case.pair], fixed_us)
        result[device] = LeftOut(
            fixed_us=fixed_us,
            actual=actual,
            expected={pair: known.expected(*pair)[0] for pair in actual},
        )
    return result


def chip_share(devices: Mapping[str, LeftOut], study: TransferErrors) -> float:
    """The share of left-out pairs within their interval, each chip counted once."""
    chips: dict[str, list[float]] = {}
    for device, result in devices.items():
        chips.setdefault(study.chips[device][1], []).extend(result.shares <= COVERED)
    return float(np.mean([np.mean(inside) for inside in chips.values()]))


def write_table(study: TransferErrors) -> None:
    """Replace the study's numbers in calibrations/transfers.yaml; the rest stays."""
    path = shipped_directory() / "transfers.yaml"
    head, _, _ = path.read_text(encoding="utf-8").partition("fixed_us_per_layer:")
    lines = [
        f"fixed_us_per_layer: {1e6 * study.fixed_s_per_layer:.0f}",
        "deviations:",
        *(f"  {slug}: {deviation:.3f}" for slug, deviation in study.deviations.items()),
        "errors:",
    ]
    for source in sorted({source for source, _ in study.pairs}):
        errors = {d: error for (s, d), error in sorted(study.pairs.items()) if s == source}
        listed = ", ".join(f"{device}: {error:.3f}" for device, error in errors.items())
        lines.append(f"  {source}: {{{listed}}}")
    write_atomic(path, head + "\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shared", type=Path, default=Path(__file__).parents[3] / "shared")
    shared = parser.parse_args().shared / "data" / "forward_latency"
    composed = composed_cases(shipped_directory())
    cases = composed + measured_cases(shared)
    fixed_us = best_fixed_us(composed)
    pairs, shipped = pair_errors(cases, fixed_us), transfer_errors()
    study = dataclasses.replace(
        shipped,
        pairs=pairs,
        deviations=fit_deviations(pairs, shipped.chips),
        fixed_s_per_layer=1e-6 * fixed_us,
    )
    devices = left_out(composed, cases, study)
    records = {name: device.record() for name, device in devices.items()}
    result = {
        "environment": environment("cpu"), "rows": f"1..{MAX_ROWS}", "context": f"0..{MAX_CONTEXT}",
        "fixed_us_per_layer": fixed_us, "covered_by_chip": round(chip_share(devices, study), 3),
        "pairs": {" to ".join(pair): error for pair, error in study.pairs.items()},
        "deviations": dict(study.deviations), **mean_and_worst(study.pairs),
        "without_fixed_time": mean_and_worst(pair_errors(cases, 0)), "devices_left_out": records,
    }  # fmt: skip
    store("transfer_study", result)
    write_table(study)
    for device, row in records.items():
        print(f"{device}: {row}")


if __name__ == "__main__":
    main()
