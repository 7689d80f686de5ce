"""Measure, fit, check on points held out, and write the profile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from costmodel.errors import InputError
from costmodel.profile import Profile
from costmodel.registry import user_directory
from costmodel.roofline import Roofline
from costmodel.schema import PeaksSection
from decoder.device import dtype_name, fingerprint, parse_dtype
from decoder.drafters.base import Drafter
from decoder.drafters.factory import load_drafter
from decoder.loading import Weights, default_target, load_model
from decoder.parallel import Ranks, rank_device
from decoder.profiles import Measurement, find_peaks, make_profile, profile_key, roofline_of
from decoder.runtime.base import RuntimeChoice
from decoder.runtime.select import runtime_kind
from decoder.target import Target
from profiler.adaptive import AdaptiveGrid
from profiler.device import collect, observe, warnings
from profiler.instruments import instruments
from profiler.journal import Journal
from profiler.lock import device_lock
from profiler.parallel import FollowedJournal, check_alike, common, shared_journal, together
from profiler.plan import PREFILL_TOKENS, SweepPlan
from profiler.sections import (
    drafter_sections,
    points_of,
    provenance_fields,
    stages_section,
    with_held_out,
    with_known_drafters,
)
from profiler.storing import check_writable, draw, keep_samples, store
from profiler.sweep import Progress, Steering, SweepResult, run_sweep
from profiler.workload import Task, Workload

CPU_CONTEXTS = (64, 256, 1024, 2048)
GPU_CONTEXTS = (64, 256, 1024, 4096, 16384)
BUDGETS_S = {"cuda": 30.0, "cpu": 45.0}  # a CPU is noisier, so it gets more samples
UNSTEADY = 0.05  # spread of the pace from which on a reader should know of it
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

    Under torchrun the processes share the target; the first one says and writes everything.
    Raises InputError, DeviceError, MeasurementError or ProfileError, and EndedElsewhere in a
    process that ends because of another. Nothing that was measured is lost when it is
    interrupted: the next call with the same settings goes on.
    """
    with together() as ranks:
        return _calibrate(settings, listener if ranks.first else Listener(), ranks)


def _calibrate(
    settings: CalibrationSettings, listener: Listener, ranks: Ranks
) -> CalibrationResult:
    device = rank_device(settings.device, ranks)
    name = settings.target
    if name is None:
        name = ranks.decide(lambda: default_target(device))
    runtime_kind(settings.runtime, device)  # an error before the target is loaded
    plan = _plan(settings, device)
    if ranks.first:
        check_writable(settings.output)
    check_alike(fingerprint(device).name, ranks)
    with _lock(device, ranks):
        activity = observe()
        dtype = parse_dtype(settings.dtype, device)
        loaded = load_model(name, weights=settings.weights, dtype=dtype, device=device, ranks=ranks)
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
        opened = shared_journal(lambda: _journal(target, drafter, plan, settings), ranks)
        with opened as journal:
            swept, seen = _sweep(
                plan, workload, roofline_of(target, peaks), journal, settings, listener
            )

            def write() -> CalibrationResult:
                provenance = provenance_fields(swept, metadata.fields | seen, activity)
                profile = _profile(target, drafter, peaks, swept, provenance)
                profile = with_known_drafters(profile, settings.output)
                return _written(profile, swept, journal, settings, found + target.runtime.warnings)

            return ranks.decide(write)


def _lock(device: torch.device, ranks: Ranks) -> contextlib.AbstractContextManager[None]:
    """The lock of this rank's device; the first rank holds that of a CPU for all."""
    if device.type == "cpu" and not ranks.first:
        return contextlib.nullcontext()
    return device_lock(f"{fingerprint(device).name} {device_label(device)}")


def _profile(
    target: Target,
    drafter: Drafter,
    peaks: PeaksSection,
    swept: SweepResult,
    provenance: dict[str, Any],
) -> Profile:
    """The profile of what was measured, checked on the points held out."""
    measurement = Measurement(
        kind="measured",
        points=points_of(swept, "verify"),
        peaks=peaks,
        provenance=provenance,
        sections={
            "stages": stages_section(swept),
            "drafters": drafter_sections(swept, drafter),
        },
    )
    return with_held_out(make_profile(target, measurement), points_of(swept, "held_out"))


def _written(
    profile: Profile,
    swept: SweepResult,
    journal: Journal | FollowedJournal,
    settings: CalibrationSettings,
    found: tuple[str, ...],
) -> CalibrationResult:
    """Write the profile, its picture and its samples."""
    path = store(profile, settings.output)
    picture = draw(profile, path)
    if isinstance(journal, Journal):
        keep_samples(journal, path)
    return CalibrationResult(
        profile=profile,
        path=path,
        picture=picture,
        warnings=found,
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
    journal: Journal | FollowedJournal,
    settings: CalibrationSettings,
    listener: Listener,
) -> tuple[SweepResult, dict[str, Any]]:
    """The measured points, and what was seen of the device meanwhile."""
    ranks = workload.ranks
    grid = AdaptiveGrid(plan, roofline, lambda task: not workload.shortfall(task))
    tools = common(instruments(workload.device), ranks)
    steering = Steering(
        budget_s=settings.time_budget_s or BUDGETS_S[workload.device.type],
        on_progress=listener.progress,
        more=lambda swept: ranks.decide(lambda: grid.more(swept)),
    )
    tasks = grid.first() + plan.held_out() + plan.stages()
    swept = run_sweep(tasks, workload, tools, journal, steering)
    _tell(swept, listener)
    return swept, tools.guard.summary()


def _tell(swept: SweepResult, listener: Listener) -> None:
    """Say what a reader of the profile would miss."""
    if swept.resumed_samples:
        listener.say(f"went on from {swept.resumed_samples} samples of an unfinished run")
    if swept.pace_spread > UNSTEADY:
        listener.say(
            f"the machine's pace varied by {swept.pace_spread:.0%}: times are given at its "
            "typical pace, and are the more certain the quieter it is"
        )
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
        "tensor_parallel": key.tensor_parallel,
        "torch": torch.__version__,
        "drafter": drafter.architecture_hash,
        "contexts": list(plan.contexts),
        "max_nodes": plan.max_nodes,
        "batches": list(plan.batches),
        "seed": plan.seed,
    }
    where, degree = device_label(target.device), f"tp{key.tensor_parallel}"
    name = f"{where}.{key.architecture_hash}.{key.dtype}.{key.runtime}.{degree}.jsonl"
    return Journal(user_directory() / "journals" / name, header, fresh=settings.fresh)


def device_label(device: torch.device) -> str:
    """`cpu` or `cuda-N`, also where the device was named without a number."""
    return "cpu" if device.type == "cpu" else f"cuda-{device.index or 0}"
