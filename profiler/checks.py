"""The checks of `rooftree doctor`, each with a finding and an advice."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Literal

import torch

from costmodel.catalog import device_by_name, find_target
from costmodel.errors import ProfileError, RooftreeError
from costmodel.profile.grade import grade
from costmodel.profile.profile import ProfileKey
from costmodel.profile.schema import RuntimeSection
from costmodel.profile.store import ProfileStore, user_directory
from decoder.device import default_dtype, dtype_name, fingerprint, select_device
from decoder.model.demo_model import demo_model_folder, has_demo_model
from decoder.model.loading import default_target
from decoder.model.making import runtime_kind
from decoder.model.runtime.fused import kernels_refused
from decoder.model.runtime.linear import packing_refused
from decoder.nvml import Gpu
from decoder.profiling.measured_profile import ATTENTION
from profiler.measure.machine import collect, warnings

Status = Literal["ok", "warn", "missing"]
DEMO = "`rooftree demo-model` fetches a small real model (93 MB), if you want one."


@dataclass(frozen=True, slots=True)
class DoctorCheck:
    """The result of one check; `advice` is empty when nothing needs to be done."""

    name: str
    status: Status
    found: str
    advice: str = ""


def run_checks() -> list[DoctorCheck]:
    device = select_device()
    metadata = collect(0 if device.type == "cuda" else None)
    target, demo = default_target(device), demo_model_folder()
    names = ("rooftree", "torch", "transformers", "numba", "python")
    versions = [(name, metadata.get(f"{name}_version")) for name in names]
    installed = ", ".join(f"{name} {version}" for name, version in versions if version)
    disturbed, folder = "; ".join(warnings(metadata)), user_directory()
    directory = DoctorCheck("data directory", "ok", str(folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        advice = "Set ROOFTREE_HOME to a directory that you can write to."
        found = f"{folder}: {error.strerror or error}"
        directory = DoctorCheck("data directory", "missing", found, advice)
    return [
        DoctorCheck("versions", "ok", installed),
        _device(device),
        directory,
        DoctorCheck("default target", "ok", target),
        _profile(target, device),
        DoctorCheck("demo model", "ok", str(demo))
        if has_demo_model()
        else DoctorCheck("demo model", "missing", f"not in {demo}", DEMO),
        DoctorCheck("machine", "warn", disturbed, "Measure when the machine is quiet.")
        if disturbed
        else DoctorCheck("machine", "ok", "quiet"),
    ]


def next_step(checks: list[DoctorCheck]) -> str:
    for name in ("data directory", "profile"):
        for check in checks:
            if check.name == name and check.status != "ok":
                return check.advice
    return "Everything is there: `rooftree generate --prompt TEXT`."


def _device(device: torch.device) -> DoctorCheck:
    here = fingerprint(device)
    dtype = dtype_name(default_dtype(device))
    text = f"{here.name}, {here.memory_bytes / 2**30:.1f} GiB, {dtype}"
    if device.type == "cuda":
        if device_by_name(here.name) is None:
            text += ", not in devices.yaml: its peaks are measured"
        refused = kernels_refused(device)
        text += f", PyTorch's own kernels ({refused})" if refused else ", our kernels"
        return DoctorCheck("device", "ok", text)
    text += f", {here.threads} threads, {here.instruction_set}"
    try:
        gpu = Gpu.open(0).read().get("gpu_name", "a GPU")
    except RooftreeError:  # the driver shows none
        return DoctorCheck("device", "ok", text)
    text += f"; the driver shows {gpu}, but torch cannot use it"
    return DoctorCheck(
        "device", "warn", text, "Install a CUDA build of torch that fits the driver."
    )


def _profile(target: str, device: torch.device) -> DoctorCheck:
    here = fingerprint(device)
    packable = packing_refused(device, default_dtype(device)) is None
    runtime = RuntimeSection(
        kind=runtime_kind("auto", device, packable=packable),
        dtype=dtype_name(default_dtype(device)),
        attention=ATTENTION,
    )
    key = ProfileKey.of(here, find_target(target).architecture.hash, runtime)
    measure = "`rooftree calibrate` measures this device (about a minute)."
    try:
        result = ProfileStore().find(key)
    except ProfileError:
        found = f"none for {target} in {runtime.dtype} on this device"
        return DoctorCheck("profile", "missing", found, measure)
    kind, mark = result.profile.provenance.kind, grade(result.profile)
    status: Status
    status, advice = ("ok", "") if kind == "measured" else ("warn", measure)
    if mark.word == "do not use":
        status, advice = "warn", "Run `rooftree calibrate --time-budget 3m` on a quieter machine."
    return DoctorCheck("profile", status, f"{kind}, {result.path}; {mark}", advice)
