"""Profiles made on this machine: their key, their sections, and the peaks of the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from platform import python_version
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from costmodel.architecture import ModelArchitecture
from costmodel.calibration.points import Points
from costmodel.calibration.selection import select_calibration
from costmodel.catalog import DeviceFingerprint, Peaks, device_by_name
from costmodel.io import now_utc, tool_version
from costmodel.profile import schema
from costmodel.profile.profile import Profile, ProfileKey
from costmodel.roofline import Roofline
from decoder.device import dtype_name, fingerprint, seconds_of
from decoder.model.runtime.linear import TiledLinear, packing_refused
from decoder.model.target import Target
from decoder.nvml import free_gpu_bytes

ATTENTION = "split"


def profile_key(target: Target) -> ProfileKey:
    """The keys that a profile must share with this decoder, hard ones and soft ones."""
    return ProfileKey.of(
        fingerprint(target.device), target.architecture.hash, runtime_section(target)
    )


def runtime_section(target: Target) -> schema.RuntimeSection:
    dtype: Any = dtype_name(target.dtype)  # one of `DTYPES`
    return schema.RuntimeSection(
        kind=target.runtime.kind,
        dtype=dtype,
        quantization=target.loaded.quantization,
        weight_bytes=target.loaded.weight_bytes,
        head_bytes=target.loaded.head_bytes,
        attention=ATTENTION,
        tensor_parallel=1,
        buckets=target.runtime.buckets,
        torch=torch.__version__,
        transformers=transformers.__version__,
        python=python_version(),
    )


def peaks_of(device: torch.device, dtype: torch.dtype) -> schema.PeaksSection:
    """The peaks of a device: measured, and those of the datasheet if it is known.

    Rooflines use the datasheet of a known GPU, so that profiles of one device agree.
    """
    measured, copy_bytes_per_s = measure_peaks(device, dtype), None
    if device.type == "cuda":  # read and written: one half of a buffer is copied to the other
        buffer = _buffer(device)
        half, other = buffer.chunk(2)
        with torch.inference_mode():
            copy_bytes_per_s = buffer.nbytes / _best_s(lambda: half.copy_(other), device)
    listed = device_by_name(fingerprint(device).name)
    # The datasheet's FLOPs are those of bfloat16; other dtypes use the measured peaks.
    known = listed is not None and dtype == torch.bfloat16
    used = listed.peaks if listed is not None and known else measured
    return schema.PeaksSection(
        source="datasheet" if known else "measured",
        flops_per_s=used.flops_per_s,
        bytes_per_s=used.bytes_per_s,
        measured_flops_per_s=measured.flops_per_s,
        measured_bytes_per_s=measured.bytes_per_s,
        measured_copy_bytes_per_s=copy_bytes_per_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSubject:
    """What a profile is of: a target in a runtime on a device, and a note on its weights."""

    device: DeviceFingerprint
    architecture: ModelArchitecture
    runtime: schema.RuntimeSection
    note: str = ""

    def roofline(self, peaks: schema.PeaksSection) -> Roofline:
        """The paper's roofline, over which calibrations are fitted."""
        return self.runtime.roofline(self.architecture, peaks)


def subject_of(target: Target) -> MeasuredSubject:
    note = f"{target.loaded.weights} weights"
    if target.loaded.weights == "random" and target.architecture.experts:
        # Dense forwards take the same time with any weights; experts do not.
        note += ", and random routing, which spreads tokens over experts more evenly than real"
    return MeasuredSubject(
        device=fingerprint(target.device),
        architecture=target.architecture,
        runtime=runtime_section(target),
        note=note,
    )


def make_profile(
    subject: MeasuredSubject,
    kind: schema.ProvenanceKind,
    points: Points,
    peaks: schema.PeaksSection,
    provenance: dict[str, Any] | None = None,
    **sections: Any,
) -> Profile:
    """Fit the calibrations and assemble the profile of a calibration or a probe.

    provenance  further fields of its section: samples, duration_s, ...
    sections    optional sections by name: stages, drafters, ...
    Raises InputError, ProfileError.
    """
    # Beside other work measured peaks come out low: raised to the points' rates.
    if peaks.source == "measured":
        physical = subject.roofline(peaks).with_count("physical")
        branches_s = physical.branches_s(points.rows, points.context, points.batch)
        flops, moved = (max(1.0, float(np.max(one / points.seconds))) for one in branches_s)
        rates = {"flops_per_s": flops * peaks.flops_per_s, "bytes_per_s": moved * peaks.bytes_per_s}
        peaks = peaks.model_copy(update=rates)
    selection = select_calibration(points, subject.roofline(peaks))
    return Profile(
        provenance=schema.ProvenanceSection(
            kind=kind,
            created_utc=now_utc(),
            tool_version=tool_version(),
            points=len(points),
            note=subject.note,
            **provenance or {},
        ),
        device=subject.device,
        target=schema.TargetSection.of(subject.architecture),
        runtime=subject.runtime,
        peaks=peaks,
        calibration=schema.CalibrationSection.of(selection),
        surface=schema.SurfaceSection.of(points),
        **sections,
    )


READ_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}  # several times any last-level cache
MATRIX_SIZE = {"cpu": 1024, "cuda": 8192}
REPEATS, LEAST_S = 5, {"cpu": 0.2, "cuda": 0.0}  # a CPU is noisier
# Calls between two readings of the clock; one launch and one wait cost a GPU 1 % of a call.
CALLS = {"cpu": 1, "cuda": 10}
CACHES = 4  # times a GPU's last cache, which a buffer has at least
MEMORY_PARTS = 8  # at most one of these parts of a GPU's free memory is read


def measure_peaks(device: torch.device, dtype: torch.dtype) -> Peaks:
    """FLOPs/s of a square matrix product in `dtype`, and bytes/s of reading a buffer (a sum).

    Each is the best of some runs, since a peak is a bound; the product is torch's, or that of
    packed weights where they can be packed and it is faster.
    """
    size = MATRIX_SIZE[device.type]
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    buffer = _buffer(device)
    with torch.inference_mode():
        product_s = _best_s(lambda: torch.mm(left, right), device)
        read_s = _best_s(lambda: buffer.sum(), device)
        if packing_refused(device, dtype) is None:
            layer = nn.Linear(size, size, bias=False, dtype=dtype)
            layer.weight.data = right.to(torch.bfloat16).to(dtype)  # such are published weights
            packed = TiledLinear([layer])
            product_s = min(product_s, _best_s(lambda: packed(left), device))
    return Peaks(flops_per_s=2.0 * size**3 / product_s, bytes_per_s=buffer.nbytes / read_s)


def _buffer(device: torch.device) -> torch.Tensor:
    """An even number of float32 ones; their sum is torch's fastest plain read on a CPU."""
    wanted_bytes = READ_BYTES[device.type]
    if device.type == "cuda":  # less where little memory is left, but not what the L2 cache holds
        cache_bytes = int(torch.cuda.get_device_properties(device).L2_cache_size)
        spare_bytes = max(free_gpu_bytes(device) // MEMORY_PARTS, CACHES * cache_bytes)
        wanted_bytes = min(wanted_bytes, spare_bytes)
    return torch.ones(wanted_bytes // 8 * 2, dtype=torch.float32, device=device)


def _best_s(function: Callable[[], object], device: torch.device) -> float:
    function()
    times_s: list[float] = []
    calls = range(CALLS[device.type])
    while len(times_s) < REPEATS or sum(times_s) < LEAST_S[device.type]:
        times_s.append(seconds_of(lambda: [function() for _ in calls], device))
    return min(times_s) / len(calls)
