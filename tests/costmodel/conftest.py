"""Shared: plausible points and profiles, and forwards that others measured."""

import csv
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from costmodel.calibration.physical import fit_physical
from costmodel.calibration.points import ErrorSummary, Points
from costmodel.calibration.selection import Selection, select_calibration
from costmodel.calibration.stairs import fit_stairs
from costmodel.catalog import DeviceFingerprint, Peaks, find_device, find_target
from costmodel.compose.tables import PublishedTables
from costmodel.io import shipped_directory
from costmodel.profile import schema
from costmodel.profile.profile import Profile
from costmodel.profile.schema import CalibrationSection, DrafterSection, NodesSection, TokensSection
from costmodel.roofline import Roofline
from tests.conftest import DATA

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
CONTEXTS = (64, 256, 1024, 2048)
# Measured on two CPU cores with SmolLM2-135M in bfloat16, 256 cached tokens.
CPU_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CPU_SECONDS = (0.050, 0.054, 0.056, 0.057, 0.064, 0.080, 0.142, 0.207, 0.341)

FINGERPRINT = DeviceFingerprint(
    kind="cpu", name="Imaginary CPU 9000", memory_bytes=16 * 2**30, threads=2,
    instruction_set="avx512_bf16",
)  # fmt: skip
SMOLLM = find_target("SmolLM2-135M-Instruct").architecture
LLAMA = find_target("Llama-3.1-8B-Instruct").architecture
ROOFLINE = Roofline(
    architecture=SMOLLM, peaks=Peaks(flops_per_s=3e11, bytes_per_s=1.5e10), element_bytes=2
)
A6000 = Roofline(architecture=LLAMA, peaks=find_device("rtx-a6000").peaks)


def grid(rows, contexts) -> tuple[np.ndarray, np.ndarray]:
    return tuple(x.ravel() for x in np.meshgrid(rows, contexts))


def cpu_seconds(rows, context):
    """An invented truth: a measured row curve and a cost of context that grows with rows."""
    rows = np.asarray(rows, dtype=float)
    return np.interp(rows, CPU_ROWS, CPU_SECONDS) + 6e-6 * np.asarray(context) * (1 + rows / 40)


def cpu_points(noise: float = 0.0, seed: int = 0, rows=ROWS, contexts=CONTEXTS) -> Points:
    rows, context = grid(rows, contexts)
    true_s = cpu_seconds(rows, context)
    factor = np.exp(noise * np.random.default_rng(seed).standard_normal(len(true_s)))
    return Points(rows=rows, context=context, seconds=true_s * factor, mad_s=true_s * noise, n=5)


def stairs_of(points: Points, roofline: Roofline = A6000, exact: bool = False):
    return fit_stairs(points, fit_physical(points, roofline), exact=exact)


@cache
def shipped(device: str, target: str = "qwen3-8b") -> Profile:
    """A shipped profile, read once; frozen, so all tests may share it."""
    return Profile.from_yaml(shipped_directory() / device / f"{target}.bfloat16.kernels.tp1.yaml")


@cache
def usual_selection() -> Selection:
    """The calibrations of the usual points, fitted once."""
    return select_calibration(cpu_points(0.01), ROOFLINE)


def altered(profile: Profile, **sections) -> Profile:
    """The profile with some fields of some sections changed, and checked again."""
    data = {name: getattr(profile, name) for name in Profile.model_fields}
    for name, fields in sections.items():
        data[name] = data[name].model_copy(update=fields)
    return Profile(**data)


def make_profile() -> Profile:
    points = cpu_points(0.01)
    three = {"mad_s": [1e-6] * 3, "n": [5] * 3}
    four = {"nodes": [1, 15, 63, 255], "mad_s": [2e-6, None, 3e-6, 1e-6], "n": [5, 1, 5, 5]}
    sections = {
        "provenance": schema.ProvenanceSection(
            kind="measured", created_utc="2026-03-01T12:00:00Z", tool_version="0.1.0",
            points=len(points), samples=5 * len(points), duration_s=28.25,
        ),
        "device": FINGERPRINT,
        "target": schema.TargetSection.of(SMOLLM),
        "runtime": schema.RuntimeSection(
            kind="eager", dtype="bfloat16", attention="ancestor", torch="2.13.0",
            transformers="5.17.0",
        ),
        "peaks": schema.PeaksSection(source="measured", flops_per_s=3e11, bytes_per_s=1.5e10),
        "calibration": CalibrationSection.of(usual_selection()),
        "surface": schema.SurfaceSection.of(points),
        "held_out": schema.HeldOutSection(
            error=ErrorSummary(points=2, mape=0.01, median=0.01, p95=0.02, worst=0.02),
            repeat_noise=0.015, rows=(3, 100), context=(100, 1500), batch=(1, 1),
            measured_s=(0.055, 0.19), predicted_s=(0.0555, 0.191),
        ),
        "regret": schema.RegretSection(mean=0.001, worst=0.01, curves=18, contexts=CONTEXTS),
        "stages": schema.StagesSection(
            plain=schema.PlainSection(
                context=(64, 1024), batch=(1, 1), median_s=(0.049, 0.056), mad_s=(0.0004, None),
                n=(9, 1),
            ),
            prefill=TokensSection(tokens=(16, 128, 512), median_s=(0.06, 0.2, 0.8), **three),
            build=NodesSection(median_s=(3e-6, 5e-6, 8e-6, 2.5e-5), **four),
            accept=NodesSection(median_s=(1e-4, 1.2e-4, 2e-4, 5e-4), **four),
            commit=TokensSection(tokens=(1, 4, 16), median_s=(1e-5, 2e-5, 5e-5), **three),
        ),
        "drafters": {
            "ngram-1": DrafterSection(
                name="ngram", context=(64, 1024), median_s=(1e-4, 3e-4), mad_s=(1e-6, 2e-6),
                n=(9, 9),
            )
        },
    }  # fmt: skip
    return Profile(**sections)


@pytest.fixture(scope="session")
def profile() -> Profile:
    """One whole measured profile; frozen, so all tests may share it."""
    return make_profile()


# Published forwards of Llama-3.1-8B: device and tensor-parallel degree.
FORWARDS = {
    "rtx-a6000_llama-3.1-8b_tp1": ("rtx-a6000", 1),
    "rtx4090_llama-3.1-8b_tp1": ("rtx-4090", 1),
    "rtxpro6000-server_llama-3.1-8b_tp1": ("rtx-pro-6000-server", 1),
    "rtxpro6000-server_llama-3.1-8b_tp2": ("rtx-pro-6000-server", 2),
}


def measured_forwards(measured: Path, name: str, column: str = "forward_us"):
    """New tokens, cached tokens and seconds of each forward that has a time.

    The cached tokens of the RTX A6000 count the new ones of a chunk.
    """
    path = measured / "forward_latency" / f"{name}.csv"
    with path.open(encoding="utf-8", newline="") as stream:
        lines = [line for line in csv.DictReader(stream) if line[column]]
    names = ("new_tokens", "context_tokens", column)
    rows, context, microseconds = (np.array([float(line[n]) for line in lines]) for n in names)
    return rows, context, microseconds * 1e-6


def measured_points(name: str) -> tuple[Points, Roofline]:
    """Forwards of up to 1024 rows at 64 to 8192 cached tokens, and the roofline of their device."""
    rows, context, seconds = measured_forwards(DATA / "measured", name)
    here = (context >= 64) & (context <= 8192) & (rows <= 1024)
    device, tensor_parallel = FORWARDS[name]
    peaks = find_device(device).peaks
    roofline = Roofline(architecture=LLAMA, peaks=peaks, tensor_parallel=tensor_parallel)
    return Points(rows=rows[here], context=context[here], seconds=seconds[here]), roofline


def without_tables() -> PublishedTables:
    """In place of `published_tables`: reading those takes seconds."""
    return PublishedTables(load=len)
