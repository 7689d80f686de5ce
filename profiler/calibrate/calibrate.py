"""Calibration of one target on one device: prepare, measure, write."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from costmodel.errors import InputError
from costmodel.profile.profile import Profile
from costmodel.profile.schema import PeaksSection
from decoder.device import dtype_name, fingerprint, parse_dtype, select_device
from decoder.drafters.base import Drafter
from decoder.drafters.factory import load_drafter
from decoder.model.loading import Weights, default_target, load_model
from decoder.model.runtime.base import RuntimeChoice
from decoder.model.target import Quantization, Target, make_target, quantised, runtime_kind
from decoder.profiling.measured_profile import (
    Measurement,
    find_peaks,
    make_profile,
    roofline_of,
    subject_of,
)
from decoder.profiling.startup import is_storable
from profiler.calibrate.files import (
    check_writable,
    device_label,
    keep_samples,
    open_journal,
    store,
    with_stored_drafters,
)
from profiler.calibrate.instruments import instruments
from profiler.calibrate.sections import (
    drafter_sections,
    points_of,
    provenance_fields,
    stages_section,
    with_held_out,
)
from profiler.calibrate.sweep import (
    EXTENSION,
    Doubt,
    Steering,
    SweepProgress,
    SweepResult,
    run_sweep,
)
from profiler.calibrate.sweep_plan import (
    PREFILL_TOKENS,
    TOLERATED_REGRET,
    AdaptiveGrid,
    SweepPlan,
)
from profiler.calibrate.workload import Task, Workload
from profiler.measure.lock import device_lock
from profiler.measure.machine import Activity, Metadata, collect, observe, warnings

CPU_CONTEXTS = (64, 256, 1024, 2048)
GPU_CONTEXTS = (64, 256, 1024, 4096, 16384)
BUDGETS_S = {"cuda": 30.0, "cpu": 45.0}  # a CPU is noisier and needs more samples
LIMIT_BUDGETS = 4  # default budgets after which a calibration ends on the noisiest machine
UNSTEADY = 0.05  # spread of the machine's pace above which it is reported
CPU_MAX_NODES = 127
GPU_MAX_NODES = 1024
GPU_PREFILL_TOKENS = (128, 512, 2048, 8192)
GPU_PLAIN_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)  # for capacity planning


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSettings:
    """Settings of a calibration; None takes the default of the device.

    target         folder, hub id or name of a known target
    weights        `auto` takes local weights where there are some, else random ones
    drafter        drafter whose cost is measured too, as in `rooftree generate`
    device         `cpu`, `cuda` or `cuda:N`
    dtype          `bfloat16`, `float16` or `float32`
    contexts       cached tokens at which to measure
    max_nodes      nodes of the largest draft tree
    batches        batch sizes; None: 1, or some of a serving engine
    time_budget_s  time to measure, once the target is loaded
    time_limit_s   most time where choosing by the profile may still cost over 3 % when the budget
                   is spent or all points are measured; None: four times the default budget, or a
                   given budget alone
    output         YAML file of the profile; None: the user's profile directory
    fresh          drop the samples of an interrupted run instead of resuming it
    seed           of the held-out points
    engine_options arguments of a serving engine (`profiler.calibrate.engines`)
    """

    target: str | None = None
    weights: Weights = "auto"
    drafter: str = "ngram"
    device: str | None = None
    dtype: str | None = None
    runtime: RuntimeChoice = "auto"
    quantization: Quantization | None = None
    contexts: tuple[int, ...] | None = None
    max_nodes: int | None = None
    batches: tuple[int, ...] | None = None
    time_budget_s: float | None = None
    time_limit_s: float | None = None
    output: Path | None = None
    fresh: bool = False
    seed: int = 0
    engine_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationResult:
    """The profile, its files, and what a user should know about the run.

    resumed_samples  samples taken over from an interrupted run
    unmeasured       tasks without a sample when the time budget was spent
    skipped          tasks that did not fit into memory, with the reason
    """

    profile: Profile
    path: Path
    picture: Path
    warnings: tuple[str, ...]
    resumed_samples: int
    unmeasured: tuple[Task, ...]
    skipped: Mapping[Task, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationListener:
    """Callbacks for messages and progress; by default they do nothing."""

    say: Callable[[str], None] = lambda text: None
    progress: Callable[[SweepProgress], None] = lambda progress: None


def calibrate(
    settings: CalibrationSettings = CalibrationSettings(),
    listener: CalibrationListener = CalibrationListener(),
) -> CalibrationResult:
    """Measure one target on one device, and store its profile, picture and raw samples.

    An interrupted run keeps its samples: the next call with the same settings resumes it.

    Raises InputError, DeviceError, MeasurementError or ProfileError.
    """
    subject = resolve(settings)
    with subject.lock():
        prepared = prepare(subject, listener)
        return write(prepared, measure(prepared, listener))


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is calibrated and where: the settings with device, dtype and target resolved."""

    settings: CalibrationSettings
    device: torch.device
    dtype: torch.dtype
    target: str

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """The lock of the device."""
        return device_lock(f"{fingerprint(self.device).name} {device_label(self.device)}")


def resolve(settings: CalibrationSettings) -> Subject:
    """Resolve device, dtype and target, and check what can be checked without loading."""
    device = select_device(settings.device)
    runtime_kind(settings.runtime, device)
    _plan(settings, device)
    check_writable(settings.output)
    return Subject(
        settings=settings,
        device=device,
        dtype=parse_dtype(settings.dtype, device),
        target=settings.target or default_target(device),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A loaded target and drafter, the plan of their sweep, and the state of the machine."""

    settings: CalibrationSettings
    target: Target
    drafter: Drafter
    plan: SweepPlan
    workload: Workload
    peaks: PeaksSection
    metadata: Metadata
    activity: Activity
    warnings: tuple[str, ...]


def prepare(subject: Subject, listener: CalibrationListener) -> Prepared:
    """Load the target and drafter, plan the sweep, and look at the machine."""
    settings, device = subject.settings, subject.device
    activity = observe()
    loaded = load_model(
        subject.target,
        weights=settings.weights,
        dtype=subject.dtype,
        device=device,
    )
    target = make_target(quantised(loaded, settings.quantization), runtime=settings.runtime)
    drafter = load_drafter(settings.drafter, target)
    plan = _fit_to_target(_plan(settings, device), settings, target)
    workload = Workload(
        target, drafter, capacity=plan.capacity, capacities=plan.capacities(), seed=plan.seed
    )
    metadata = collect(device.index or 0 if device.type == "cuda" else None)
    machine_warnings = warnings(metadata, activity)
    listener.say(
        f"{loaded.name} ({loaded.weights} weights, {dtype_name(target.dtype)}) on "
        f"{fingerprint(device).name}"
    )
    for warning in machine_warnings:
        listener.say(f"warning: {warning}")
    if not is_storable(drafter):
        listener.say(f"the cost of {drafter.name} is not kept: its package is not installed")
    return Prepared(
        settings=settings,
        target=target,
        drafter=drafter,
        plan=plan,
        workload=workload,
        peaks=find_peaks(target),
        metadata=metadata,
        activity=activity,
        warnings=machine_warnings,
    )


def _plan(settings: CalibrationSettings, device: torch.device) -> SweepPlan:
    """The points for a device. Raises InputError for settings that give none."""
    cpu = device.type == "cpu"
    return SweepPlan(
        contexts=settings.contexts or (CPU_CONTEXTS if cpu else GPU_CONTEXTS),
        max_nodes=settings.max_nodes or (CPU_MAX_NODES if cpu else GPU_MAX_NODES),
        batches=settings.batches or (1,),
        seed=settings.seed,
        prefill_tokens=PREFILL_TOKENS if cpu else GPU_PREFILL_TOKENS,
        plain_batches=() if cpu else GPU_PLAIN_BATCHES,
    )


def _fit_to_target(plan: SweepPlan, settings: CalibrationSettings, target: Target) -> SweepPlan:
    """The plan at the target's buckets, without default contexts beyond its positions.

    Contexts of the settings stay; the workload refuses those beyond the target's positions.
    """
    plan = replace(plan, buckets=target.runtime.buckets)
    if settings.contexts is not None:
        return plan
    longest = target.max_context - plan.padded(plan.max_nodes + 1)
    contexts = tuple(context for context in plan.contexts if context <= longest)
    if len(contexts) < 2:
        raise InputError(
            f"{target.loaded.name} has {target.max_context} positions, too few for the usual "
            f"contexts and {plan.max_nodes} nodes",
            hint="Choose smaller --contexts and --max-nodes.",
        )
    return replace(plan, contexts=contexts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The samples of a sweep, the device's state meanwhile, and the journal's file."""

    swept: SweepResult
    device_state: dict[str, Any]
    journal: Path


def measure(prepared: Prepared, listener: CalibrationListener) -> Measured:
    """Sweep the points of the plan; every sample goes into the journal."""
    settings, plan, workload = prepared.settings, prepared.plan, prepared.workload
    target = prepared.target
    roofline = roofline_of(target, prepared.peaks)
    grid = AdaptiveGrid([task for task in plan.grid() if not workload.shortfall(task)], roofline)
    tools = instruments(workload.device)
    default_s = BUDGETS_S[workload.device.type]
    budget_s = settings.time_budget_s or default_s
    limit_s = settings.time_limit_s or (
        LIMIT_BUDGETS * default_s if settings.time_budget_s is None else budget_s
    )
    steering = Steering(
        budget_s=budget_s,
        limit_s=limit_s,
        on_progress=listener.progress,
        more=grid.more,
        doubt=grid.doubt,
        on_doubt=tell_of_doubts(listener),
    )
    tasks = grid.first() + plan.held_out() + plan.stages()
    with open_journal(target, prepared.drafter, plan, fresh=settings.fresh) as journal:
        swept = run_sweep(tasks, workload, tools, journal, steering)
    report_sweep(swept, listener, budget_s)
    return Measured(swept=swept, device_state=tools.guard.summary(), journal=journal.path)


def tell_of_doubts(listener: CalibrationListener) -> Callable[[Doubt, float], None]:
    """Says once why a sweep goes on and for how long, then whenever the worst choice has halved."""
    told = 2.0

    def tell(doubt: Doubt, left_s: float) -> None:
        nonlocal told
        if doubt.worst_regret > told / 2:
            return
        told = doubt.worst_regret
        points = f"{len(doubt.tasks)} points" if doubt.tasks else "the points"
        listener.say(
            f"a choice of tree size may still cost {told:.1%}: {points} behind it are measured "
            f"further, until it is {TOLERATED_REGRET:.0%}, for at most {left_s:.0f} s"
        )

    return tell


def report_sweep(swept: SweepResult, listener: CalibrationListener, budget_s: float) -> None:
    """Report what the profile itself does not show."""
    if swept.spent_s >= (1 + EXTENSION) * budget_s:
        listener.say(
            f"measured for {swept.spent_s:.0f} s instead of {budget_s:.0f} s: by the samples of "
            f"the first {budget_s:.0f} s a choice of tree size could cost over "
            f"{TOLERATED_REGRET:.0%}"
        )
    if swept.resumed_samples:
        listener.say(f"went on from {swept.resumed_samples} samples of an unfinished run")
    if swept.damaged_lines:
        listener.say(
            f"left out {swept.damaged_lines} damaged samples in the journal of an unfinished run"
        )
    if swept.pace_spread > UNSTEADY:
        listener.say(
            f"the machine's pace varied by {swept.pace_spread:.0%}: times are corrected to its "
            "typical pace, and would be more certain on a quiet machine"
        )
    drafts = sum(task.kind == "draft" for task in swept.unmeasured)
    if drafts:
        listener.say(
            f"the drafter's cost may be left out of the profile: {drafts} of its points did not "
            "fit the time budget; run again with a larger --time-budget"
        )
    for task, reason in swept.skipped.items():
        listener.say(
            f"skipped {task.kind} of {task.size} at context {task.context}, batch {task.batch}: "
            f"{reason}"
        )


def write(prepared: Prepared, measured: Measured) -> CalibrationResult:
    """Fit the profile, check it on the held-out points, and write its files."""
    settings, swept = prepared.settings, measured.swept
    profile = with_stored_drafters(_profile(prepared, measured), settings.output)
    path, picture = store(profile, settings.output)
    keep_samples(measured.journal, path)
    return CalibrationResult(
        profile=profile,
        path=path,
        picture=picture,
        warnings=prepared.warnings + prepared.target.runtime.warnings,
        resumed_samples=swept.resumed_samples,
        unmeasured=swept.unmeasured,
        skipped=swept.skipped,
    )


def _profile(prepared: Prepared, measured: Measured) -> Profile:
    """The profile of the samples, with its error on the held-out points."""
    swept = measured.swept
    state = prepared.metadata.fields | measured.device_state
    measurement = Measurement(
        kind="measured",
        points=points_of(swept, "verify"),
        peaks=prepared.peaks,
        provenance=provenance_fields(swept, state, prepared.activity),
        sections={
            "stages": stages_section(swept),
            "drafters": drafter_sections(swept, prepared.drafter),
        },
    )
    profile = make_profile(subject_of(prepared.target), measurement)
    return with_held_out(profile, points_of(swept, "held_out"))
