"""Calibration of vLLM's own steps: prepare, measure, write."""

from __future__ import annotations

from dataclasses import dataclass
from platform import python_version
from statistics import median
from typing import Any

import numpy as np
import torch

from costmodel.calibration.points import Points
from costmodel.errors import InputError
from costmodel.profile.profile import Profile
from costmodel.profile.schema import EngineDrafterSection, PeaksSection, RuntimeSection
from costmodel.profile.store import user_directory
from decoder.device import dtype_name, fingerprint, parse_dtype, select_device
from decoder.drafters.factory import DEMO_DRAFTER
from decoder.model.loading import default_target
from decoder.profiling.measured_profile import (
    MeasuredSubject,
    Measurement,
    make_profile,
    peaks_of,
)
from integrations.vllm.configuration import (
    architecture_of,
    drafter_key,
    engine_section,
    installed_version,
    speculative_options,
)
from integrations.vllm.engine import SteppedEngine, spare_tokens
from profiler.calibrate.calibrate import (
    CPU_CONTEXTS,
    CalibrationListener,
    CalibrationResult,
    CalibrationSettings,
    report_sweep,
    tell_of_doubts,
)
from profiler.calibrate.engines.workload import EnginePlan, EngineWorkload
from profiler.calibrate.files import (
    check_writable,
    device_label,
    keep_samples,
    store,
    with_stored_drafters,
)
from profiler.calibrate.instruments import MIN_SAMPLES, Instruments, gpu_guard
from profiler.calibrate.sections import points_of, provenance_fields, stages_section, with_held_out
from profiler.calibrate.sweep import Steering, SweepResult, run_sweep
from profiler.calibrate.sweep_plan import AdaptiveGrid
from profiler.measure.guards import CpuGuard
from profiler.measure.journal import Journal
from profiler.measure.lock import device_lock
from profiler.measure.machine import Activity, Metadata, collect, observe, warnings
from profiler.measure.stopping import NoiseRule
from profiler.measure.timers import ReportTimer

BATCHES = (1, 2, 4, 8)
GPU_CONTEXTS = (64, 512, 2048, 8192)
MAX_NODES = 15
BUDGET_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedEngine:
    """A started engine, the plan of its sweep, and the state of the machine."""

    settings: CalibrationSettings
    engine: SteppedEngine
    plan: EnginePlan
    subject: MeasuredSubject
    peaks: PeaksSection
    metadata: Metadata
    activity: Activity
    warnings: tuple[str, ...]


def calibrate_engine(
    settings: CalibrationSettings, listener: CalibrationListener
) -> CalibrationResult:
    """Measure vLLM's steps with one target, and store the profile, picture and raw samples.

    The engine's scheduler runs in this process. An interrupted run keeps its samples. Raises
    InputError, DeviceError, DrafterError, MeasurementError or ProfileError.
    """
    installed_version()
    check_writable(settings.output)
    device = select_device(settings.device)
    with device_lock(f"{fingerprint(device).name} {device_label(device)}"):
        prepared = _prepare(settings, device, listener)
        workload = EngineWorkload(prepared.engine)
        with _journal(prepared) as journal:
            swept, state = _measure(prepared, workload, journal, listener)
        profile = _profile(prepared, swept, state, workload.host_s)
        path, picture = store(with_stored_drafters(profile, settings.output), settings.output)
        keep_samples(journal.path, path)
    return CalibrationResult(
        profile=profile,
        path=path,
        picture=picture,
        warnings=prepared.warnings,
        resumed_samples=swept.resumed_samples,
        unmeasured=swept.unmeasured,
        skipped=swept.skipped,
    )


def _prepare(
    settings: CalibrationSettings, device: torch.device, listener: CalibrationListener
) -> PreparedEngine:
    """Look at the machine, plan the sweep, start the engine, and measure the peaks."""
    activity = observe()
    metadata = collect(device.index or 0 if device.type == "cuda" else None)
    machine_warnings = warnings(metadata, activity)
    dtype = parse_dtype(settings.dtype, device)
    contexts = settings.contexts or (CPU_CONTEXTS if device.type == "cpu" else GPU_CONTEXTS)
    batches = settings.batches or BATCHES
    drafter = str(DEMO_DRAFTER) if settings.drafter == "demo" else settings.drafter
    speculative = speculative_options(drafter, settings.max_nodes or MAX_NODES)
    most_rows = speculative["num_speculative_tokens"] + 1
    plan = EnginePlan(
        contexts=contexts,
        batches=batches,
        most_rows=most_rows,
        drafts=drafter != "none",
        seed=settings.seed,
    )
    options = {
        "model": settings.target or default_target(device),
        "dtype": dtype_name(dtype),
        "max_num_seqs": max(batches),
        "max_model_len": max(contexts) + spare_tokens(most_rows - 1),
        "speculative_config": speculative,
    }
    engine = SteppedEngine(options | dict(settings.engine_options))
    if engine.device.type != device.type:
        raise InputError(
            f"this vLLM runs on {engine.device.type}, not on {device.type}",
            hint=f"Give --device {engine.device.type}, or install a vLLM for the other.",
        )
    peaks = engine.in_worker(peaks_of, device, dtype)
    device_fingerprint = engine.in_worker(fingerprint, device)
    subject = MeasuredSubject(
        device=device_fingerprint,
        architecture=architecture_of(engine.config),
        runtime=_runtime(engine),
        note=f"vLLM's own steps, drafter {settings.drafter}",
    )
    listener.say(f"{subject.architecture.name} in vLLM on {device_fingerprint.name}")
    for warning in machine_warnings:
        listener.say(f"warning: {warning}")
    return PreparedEngine(
        settings=settings,
        engine=engine,
        plan=plan,
        subject=subject,
        peaks=peaks,
        metadata=metadata,
        activity=activity,
        warnings=machine_warnings,
    )


def _runtime(engine: SteppedEngine) -> RuntimeSection:
    import transformers

    config = engine.config
    return RuntimeSection(
        kind="vllm",
        dtype=dtype_name(config.model_config.dtype),
        quantization=config.model_config.quantization,
        attention=engine.attention,
        tensor_parallel=config.parallel_config.tensor_parallel_size,
        torch=torch.__version__,
        transformers=transformers.__version__,
        python=python_version(),
        engine=engine_section(config),
    )


def _journal(prepared: PreparedEngine) -> Journal:
    """The journal of exactly this run."""
    plan, runtime = prepared.plan, prepared.subject.runtime
    header = {
        "device": prepared.subject.device.name,
        "target": prepared.subject.architecture.hash,
        "runtime": runtime.model_dump(exclude_none=True),
        "drafter": drafter_key(prepared.engine.config),
        "contexts": list(plan.contexts),
        "batches": list(plan.batches),
        "most_rows": plan.most_rows,
        "seed": plan.seed,
    }
    name = f"{prepared.subject.architecture.hash}.{runtime.dtype}.{runtime.kind}.jsonl"
    path = user_directory() / "journals" / name
    return Journal(path, header, fresh=prepared.settings.fresh)


def _measure(
    prepared: PreparedEngine,
    workload: EngineWorkload,
    journal: Journal,
    listener: CalibrationListener,
) -> tuple[SweepResult, dict[str, Any]]:
    """Sweep the points of the plan; also the device's state meanwhile."""
    plan, settings, device = prepared.plan, prepared.settings, prepared.engine.device
    guard = CpuGuard() if device.type == "cpu" else gpu_guard(device.index or 0)
    tools = Instruments(timer=ReportTimer(), guard=guard, rule=NoiseRule(min_samples=MIN_SAMPLES))
    grid = AdaptiveGrid(plan.grid(), prepared.subject.roofline(prepared.peaks))
    budget_s = settings.time_budget_s or BUDGET_S
    steering = Steering(
        budget_s=budget_s,
        limit_s=settings.time_limit_s,
        on_progress=listener.progress,
        more=grid.more,
        doubt=grid.doubt,
        on_doubt=tell_of_doubts(listener),
    )
    tasks = grid.first() + plan.held_out() + plan.draft_tasks() + plan.prefill_tasks()
    swept = run_sweep(tasks, workload, tools, journal, steering)
    report_sweep(swept, listener, budget_s)
    return swept, guard.summary()


def _profile(
    prepared: PreparedEngine, swept: SweepResult, state: dict[str, Any], host_s: list[float]
) -> Profile:
    """The profile of the samples, with its error on the held-out points."""
    subject = prepared.subject
    if subject.device.kind == "cuda":
        engine = engine_section(prepared.engine.config)
        timed = engine.model_copy(update={"host_s": median(host_s)})
        runtime = subject.runtime.model_copy(update={"engine": timed})
        subject = MeasuredSubject(
            device=subject.device,
            architecture=subject.architecture,
            runtime=runtime,
            note=subject.note,
        )
    points: Points = points_of(swept, "verify")
    fields = prepared.metadata.fields | state
    measurement = Measurement(
        kind="measured",
        points=points,
        peaks=prepared.peaks,
        provenance=provenance_fields(swept, fields, prepared.activity),
        sections={
            "stages": stages_section(swept),
            "engine_drafters": _drafters(prepared, swept),
        },
    )
    return with_held_out(make_profile(subject, measurement), points_of(swept, "held_out"))


def _drafters(prepared: PreparedEngine, swept: SweepResult) -> dict[str, EngineDrafterSection]:
    """The drafter's cost, where one was named and all its points were measured."""
    tasks = sorted(
        prepared.plan.draft_tasks(), key=lambda task: (task.batch, task.size, task.context)
    )
    samples = [swept.samples[task] for task in tasks if task in swept.samples]
    if not tasks or len(samples) < len(tasks):
        return {}
    section = EngineDrafterSection(
        name=prepared.settings.drafter,
        batch=[task.batch for task in tasks],
        tokens=[task.size for task in tasks],
        context=[task.context for task in tasks],
        median_s=np.array([sample.median_s for sample in samples]),
        mad_s=[sample.mad_s for sample in samples],
        n=[sample.n for sample in samples],
    )
    return {drafter_key(prepared.engine.config): section}
