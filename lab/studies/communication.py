"""The all-reduces of tensor parallelism, fitted to published measurements.

    python -m lab.studies.communication [--write]

Protocols are fitted to every other message size of the fastest engine's measurements
(aiconfigurator-core, NVIDIA, Apache-2.0), from 1 KB to 64 MB, and scored on the sizes between. With
`--write`, fits to all sizes replace calibrations/communication.yaml.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.communication import LinkProtocol, all_reduce_s
from costmodel.compose.aiconfigurator import ENGINES, SYSTEMS, all_reduce_curves, data_folder
from lab.studies.common import environment, store

FILE = Path(__file__).parents[2] / "calibrations" / "communication.yaml"
HEADER = """\
# All-reduces by device and number of devices: lines over the bytes of a message, each from the
# first number of bytes on: [bytes, latency in seconds, seconds a byte].
#
# Fitted by lab/studies/communication.py to the fastest engine's measurements in aiconfigurator-core
# (NVIDIA, Apache-2.0); lab/studies/results/communication.json has the errors on sizes left out.

"""
LEAST_BYTES, MOST_BYTES = 1024, 64 * 2**20
# Most protocols of one device and degree, and the gain in mean squared error that one must bring.
MOST_PROTOCOLS = 4
WORTH_A_PROTOCOL = 1e-4
LEAST_SIZES = 2


def fit_protocols(message_bytes: np.ndarray, seconds: np.ndarray) -> list[LinkProtocol]:
    """The lines of least squared relative error, each over two sizes or more.

    `message_bytes` ascend. All cuts are tried by dynamic programming; another protocol must lower
    the mean squared error by 1e-4.
    """
    count = len(message_bytes)
    lines = {
        (i, j): _line(message_bytes[i:j], seconds[i:j])
        for i in range(count)
        for j in range(i + LEAST_SIZES, count + 1)
    }
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for j in range(1, count + 1):
        ends = [
            (loss + lines[i, j][0] + WORTH_A_PROTOCOL * count, [*starts, i])
            for i, (loss, starts) in best.items()
            if (i, j) in lines and len(starts) < MOST_PROTOCOLS
        ]
        if ends:
            best[j] = min(ends)
    starts = best[count][1]
    return [
        LinkProtocol(from_bytes=float(message_bytes[i]) if i else 0.0, latency_s=a, byte_s=b)
        for i, j in zip(starts, [*starts[1:], count], strict=True)
        for a, b in [lines[i, j][1]]
    ]


def _line(size: np.ndarray, seconds: np.ndarray) -> tuple[float, tuple[float, float]]:
    """Squared relative error and (latency, slope), neither negative."""
    design = np.stack([1 / seconds, size / seconds], axis=1)
    both = np.linalg.lstsq(design, np.ones(len(size)), rcond=None)[0]
    flat = float(design[:, 0].sum() / (design[:, 0] ** 2).sum())
    steep = float(design[:, 1].sum() / (design[:, 1] ** 2).sum())
    tried = [np.array([flat, 0.0]), np.array([0.0, steep])]
    if np.all(both >= 0):
        tried = [both]
    losses = [float(np.sum((design @ line - 1) ** 2)) for line in tried]
    line = tried[int(np.argmin(losses))]
    return min(losses), (float(line[0]), float(line[1]))


def curves() -> Iterator[tuple[str, int, np.ndarray, np.ndarray]]:
    """(device, devices, bytes, seconds of the fastest engine) of every measured all-reduce."""
    for slug, system in SYSTEMS.items():
        by_engine = [all_reduce_curves(data_folder() / system, engine) for engine in ENGINES]
        for devices in sorted({count for curve in by_engine for count in curve}):
            measured = [curve[devices] for curve in by_engine if devices in curve]
            size = measured[0][0]
            fastest = np.min([np.interp(size, *curve) for curve in measured], axis=0)
            inside = (2 * size >= LEAST_BYTES) & (2 * size <= MOST_BYTES)
            yield slug, devices, 2 * size[inside], fastest[inside]


def left_out_errors(size: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Relative errors at every size but the ends, from fits to every other size."""
    errors = []
    for start in (0, 1):
        fitted = np.zeros(len(size), dtype=bool)
        fitted[start::2] = fitted[0] = fitted[-1] = True
        protocols = fit_protocols(size[fitted], seconds[fitted])
        errors.append(all_reduce_s(protocols, size[~fitted]) / seconds[~fitted] - 1)
    return np.concatenate(errors)


def all_reduces(*, write: bool) -> dict[str, Any]:
    """Errors by device and degree; with `write`, the file of fits to all sizes."""
    lines, every, by_kind = [HEADER.rstrip("\n"), ""], [], {}
    for slug, devices, size, seconds in curves():
        errors = left_out_errors(size, seconds)
        every.append(np.abs(errors))
        by_kind[f"{slug} x {devices}"] = {
            "mean": round(float(np.mean(np.abs(errors))), 4),
            "worst": round(float(np.max(np.abs(errors))), 4),
        }
        rows = ", ".join(
            f"[{p.from_bytes:.0f}, {p.latency_s:.4g}, {p.byte_s:.4g}]"
            for p in fit_protocols(size, seconds)
        )
        if f"{slug}:" not in lines:
            lines.append(f"{slug}:")
        lines.append(f"  {devices}: [{rows}]")
    if write:
        FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    pooled = np.concatenate(every)
    return {
        "sizes": f"{LEAST_BYTES} to {MOST_BYTES} bytes, every other one left out in turn",
        "mean": round(float(np.mean(pooled)), 4),
        "p95": round(float(np.quantile(pooled, 0.95)), 4),
        "by_device": by_kind,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true")
    reduced = all_reduces(write=parser.parse_args().write)
    print(f"all-reduces: mean {reduced['mean']:.1%}, p95 {reduced['p95']:.1%}", flush=True)
    store("communication", {"environment": environment("cpu"), "all_reduces": reduced})


if __name__ == "__main__":
    main()
