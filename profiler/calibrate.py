"""Measure, fit, check on points held out, and write the profile."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from costmodel.errors import InputError
from costmodel.profile import Profile
from costmodel.registry import ProfileStore, user_directory
from costmodel.roofline import Roofline
from decoder.device import dtype_name, fingerprint, parse_dtype, select_device
from decoder.drafters.base import Drafter
from decoder.drafters.factory import load_drafter
from decoder.loading import Weights, default_target, load_model
from decoder.profiles import Measurement, find_peaks, make_profile, profile_key, roofline_of
from decoder.runtime.base import RuntimeChoice
from decoder.runtime.select import runtime_kind
from decoder.target import Target
from profiler.adaptive import AdaptiveGrid
from profiler.device import collect, observe, warnings
from profiler.instruments import instruments
from profiler.journal import Journal
from profiler.lock import device_lock
from profiler.plan import PREFILL_TOKENS, SweepPlan
from profiler.sections import (
    drafter_sections,
    points_of,
    provenance_fields,
    stages_section,
    with_held_out,
    with_known_drafters,
)
from profiler.sweep import Progress, Steering, SweepResult, run_sweep
from profiler.workload import Task, Workload

CPU_CONTEXTS = (64, 256, 1024, 2048)
GPU_CONTEXTS = (64, 256, 1024, 4096, 16384)
BUDGETS_S = {"cuda": 30.0, "cpu": 45.0}  # a CPU is noisier, so it gets more samples
CPU_MAX_NODES = 127
GPU_MAX_NODES = 1024
GPU_PREFILL_TOKENS = (128, 512, 2048, 8192)
GPU_PLAIN_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)  # capacity planning needs them


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSettings:
    """What to calibrate; None takes what suits the device."""

    target: str | None = None
    weights: Weights = "auto"
    drafter: str = "ngram"
    device: str | None = None
    dtype: str | None = None
    runtime: RuntimeChoice = "auto"
    contexts: tuple[int, ...] | None = None
    max_nodes: int | None = None
    batches: tuple[int, ...] = (1,)
    time_budget_s: float | None = None
    output: Path | None = None
    fresh: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationResult:
    """The profile, where it and its picture lie, and what a user should know."""

    profile: Profile
    path: Path
    picture: Path
    warnings: tuple[str, ...]
    resumed_samples: int
    unmeasured: tuple[Task, ...]
    skipped: Mapping[Task, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """Told about the progress; both do nothing by default."""

    say: Callable[[str], None] = lambda text: None
    progress: Callable[[Progress], None] = lambda progress: None


def calibrate(settings: CalibrationSettings, listener: Listener = Listener()) -> CalibrationResult:
    """Calibrate one target on one device and store the profile.

    Raises InputError, DeviceError, MeasurementError or ProfileError. Nothing that was
    measured is lost when it is interrupted: the next call with the same settings goes on.
    """
    device = select_device(settings.device)
    name = default_target(device) if settings.target is None else settings.target
    runtime_kind(settings.runtime, device)  # an error before the target is loaded
    plan = _plan(settings, device)
    check_writable(settings.output)
    with device_lock(f"{fingerprint(device).name} {device_label(device)}"):
        activity = observe()
        dtype = parse_dtype(settings.dtype, device)
        loaded = load_model(name, weights=settings.weights, dtype=dtype, device=device)
        target = Target(loaded, runtime=settings.runtime)
        drafter = load_drafter(settings.drafter, target)
        plan = _fit_target(plan, settings, target)
        workload = Workload(
            target, drafter, capacity=plan.capacity, capacities=plan.capacities(), seed=plan.seed
        )
        metadata = collect(device.index or 0 if device.type == "cuda" else None)
        found = warnings(metadata, activity)
        _introduce(target, found, listener)
        peaks = find_peaks(target)
        with _journal(target, drafter, plan, settings) as journal:
            swept, seen = _sweep(
                plan, workload, roofline_of(target, peaks), journal, settings, listener
            )
            measurement = Measurement(
                kind="measured",
                points=points_of(swept, "verify"),
                peaks=peaks,
                provenance=provenance_fields(swept, metadata.fields | seen, activity),
                sections={
                    "stages": stages_section(swept),
                    "drafters": drafter_sections(swept, drafter),
                },
            )
            profile = make_profile(target, measurement)
            profile = with_held_out(profile, points_of(swept, "held_out"))
            profile = with_known_drafters(profile, settings.output)
            path = _store(profile, settings.output)
            picture = _draw(profile, path)
            keep_samples(journal, path)
    return CalibrationResult(
        profile=profile,
        path=path,
        picture=picture,
        warnings=found + target.runtime.warnings,
        resumed_samples=swept.resumed_samples,
        unmeasured=swept.unmeasured,
        skipped=swept.skipped,
    )


def _introduce(target: Target, found: tuple[str, ...], listener: Listener) -> None:
    """Say what is measured, and what may spoil it."""
    loaded = target.loaded
    listener.say(
        f"{loaded.name} ({loaded.weights} weights, {dtype_name(target.dtype)}) on "
        f"{fingerprint(target.device).name}"
    )
    for warning in found:
        listener.say(f"warning: {warning}")


def check_writable(output: Path | None) -> None:
    """Raise InputError before measuring when the profile could not be written afterwards."""
    folder = user_directory() if output is None else output.absolute().parent
    if output is not None and (output.is_dir() or output.suffix != ".yaml"):
        raise InputError(
            f"the profile cannot be written to {output}",
            hint="Give --output a file name ending in .yaml.",
        )
    probe = folder / ".rooftree-writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"\0" * 4096)
    except OSError as error:
        raise InputError(
            f"cannot write to {folder}: {error.strerror or error}",
            hint="Choose another --output, or set ROOFTREE_HOME to a folder you can write to.",
        ) from error
    finally:
        with contextlib.suppress(OSError):  # where it could not be made it is not there
            probe.unlink()


def keep_samples(journal: Journal, path: Path) -> None:
    """The raw samples go beside the profile, as `<profile>.samples.jsonl`, whole or not at all."""
    journal.close()
    sidecar = path.with_suffix(".samples.jsonl")
    part = sidecar.with_suffix(".part")
    try:
        shutil.move(journal.path, part)
        part.replace(sidecar)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise InputError(
            f"the profile {path} is written, but not its raw samples: {error.strerror or error}",
            hint="Free some space and run the same command again; nothing is measured anew.",
        ) from error


def _plan(settings: CalibrationSettings, device: torch.device) -> SweepPlan:
    cpu = device.type == "cpu"
    return SweepPlan(
        contexts=settings.contexts or (CPU_CONTEXTS if cpu else GPU_CONTEXTS),
        max_nodes=settings.max_nodes or (CPU_MAX_NODES if cpu else GPU_MAX_NODES),
        batches=settings.batches,
        seed=settings.seed,
        prefill_tokens=PREFILL_TOKENS if cpu else GPU_PREFILL_TOKENS,
        plain_batches=() if cpu else GPU_PLAIN_BATCHES,
    )


def _fit_target(plan: SweepPlan, settings: CalibrationSettings, target: Target) -> SweepPlan:
    """The plan at the target's buckets, without default contexts beyond its positions.

    Contexts that were asked for stay, and are errors later.
    """
    plan = replace(plan, buckets=target.runtime.buckets)
    if settings.contexts is not None:
        return plan
    room = target.max_context - plan.padded(plan.max_nodes + 1)
    fitting = tuple(context for context in plan.contexts if context <= room)
    if len(fitting) < 2:
        raise InputError(
            f"{target.loaded.name} has {target.max_context} positions, too few for the usual "
            f"contexts and {plan.max_nodes} nodes",
            hint="Choose smaller --contexts and --max-nodes.",
        )
    return replace(plan, contexts=fitting)


def _sweep(
    plan: SweepPlan,
    workload: Workload,
    roofline: Roofline,
    journal: Journal,
    settings: CalibrationSettings,
    listener: Listener,
) -> tuple[SweepResult, dict[str, Any]]:
    """The measured points, and what was seen of the device meanwhile."""
    grid = AdaptiveGrid(plan, roofline, lambda task: not workload.shortfall(task))
    tools = instruments(workload.device)
    steering = Steering(
        budget_s=settings.time_budget_s or BUDGETS_S[workload.device.type],
        on_progress=listener.progress,
        more=grid.more,
    )
    tasks = grid.first() + plan.held_out() + plan.stages()
    swept = run_sweep(tasks, workload, tools, journal, steering)
    _tell(swept, listener)
    return swept, tools.guard.summary()


def _tell(swept: SweepResult, listener: Listener) -> None:
    """Say what a reader of the profile would miss."""
    if swept.resumed_samples:
        listener.say(f"went on from {swept.resumed_samples} samples of an unfinished run")
    for task, reason in swept.skipped.items():
        listener.say(
            f"skipped {task.kind} of {task.size} at context {task.context}, batch {task.batch}: "
            f"{reason}"
        )


def _journal(
    target: Target, drafter: Drafter, plan: SweepPlan, settings: CalibrationSettings
) -> Journal:
    """The journal of exactly this run: same device, target, runtime and plan."""
    key = profile_key(target)
    header = {
        "device": key.device_name,
        "target": key.architecture_hash,
        "weights": target.loaded.weights,
        "dtype": key.dtype,
        "runtime": key.runtime,
        "threads": key.threads,
        "torch": torch.__version__,
        "drafter": drafter.architecture_hash,
        "contexts": list(plan.contexts),
        "max_nodes": plan.max_nodes,
        "batches": list(plan.batches),
        "seed": plan.seed,
    }
    where = device_label(target.device)
    name = f"{where}.{key.architecture_hash}.{key.dtype}.{key.runtime}.jsonl"
    return Journal(user_directory() / "journals" / name, header, fresh=settings.fresh)


def device_label(device: torch.device) -> str:
    """`cpu` or `cuda-N`, also where the device was named without a number."""
    return "cpu" if device.type == "cpu" else f"cuda-{device.index or 0}"


def _store(profile: Profile, output: Path | None) -> Path:
    if output is None:
        return ProfileStore().save(profile)
    profile.to_yaml(output)
    return output


def _draw(profile: Profile, path: Path) -> Path:
    from profiler.report import plot_profile

    return plot_profile(profile, path.with_suffix(".png"))
