"""Calibration of a server over HTTP: prepare, measure, write."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from costmodel.architecture import ModelArchitecture
from costmodel.catalog import DeviceFingerprint, find_device, resolve_target
from costmodel.errors import InputError, shown
from costmodel.profile.profile import Profile
from costmodel.profile.schema import PeaksSection, RuntimeSection
from costmodel.profile.store import user_directory
from decoder.device import dtype_name, fingerprint, parse_dtype, select_device
from decoder.profiling.measured_profile import (
    MeasuredSubject,
    Measurement,
    make_profile,
    peaks_of,
)
from profiler.calibrate.calibrate import (
    CPU_CONTEXTS,
    CalibrationListener,
    CalibrationResult,
    CalibrationSettings,
    report_sweep,
    tell_of_doubts,
)
from profiler.calibrate.files import check_writable, keep_samples, store
from profiler.calibrate.instruments import Instruments
from profiler.calibrate.sections import points_of, provenance_fields, stages_section, with_held_out
from profiler.calibrate.served.client import Address, ServedModel, ServerClient
from profiler.calibrate.served.times import ForwardTimes, forward_times
from profiler.calibrate.served.workload import (
    ArrivalGuard,
    ServedPlan,
    ServedWorkload,
    draw_contexts,
)
from profiler.calibrate.sweep import Steering, SweepResult, run_sweep
from profiler.calibrate.sweep_plan import AdaptiveGrid
from profiler.measure.journal import Journal
from profiler.measure.lock import device_lock
from profiler.measure.machine import Activity, observe
from profiler.measure.stopping import NoiseRule
from profiler.measure.timers import ReportTimer

BATCHES = (1, 2, 4, 8)
GPU_CONTEXTS = (128, 512, 2048, 8192)
MAX_NODES = 15
BUDGET_S = 90.0
MIN_SAMPLES = 6  # fewer than in this process: a sample of a plain step is of several steps
LOCAL_DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The server of a calibration.

    url              http://HOST:PORT
    model            its name there; None: the only one, or the one named like the target
    api_key          environment variable that holds the key
    tensor_parallel  devices that share the target there
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    tensor_parallel: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedServer:
    """A server that was asked what it is, and the plan of its sweep."""

    settings: CalibrationSettings
    subject: MeasuredSubject
    peaks: PeaksSection
    plan: ServedPlan
    workload: ServedWorkload
    address: Address
    activity: Activity
    remarks: tuple[str, ...]


def calibrate_server(
    settings: CalibrationSettings, server: ServerSettings, listener: CalibrationListener
) -> CalibrationResult:
    """Measure a server's forwards over HTTP, and store the profile, picture and raw samples.

    An interrupted run keeps its samples. Raises InputError, DeviceError, MeasurementError or
    ProfileError.
    """
    address = Address.parse(server.url)
    check_writable(settings.output)
    device = _place(settings, address)
    label = str(address) if device is None else f"{fingerprint(device).name} {device}"
    with device_lock(label):
        prepared = _prepare(settings, server, device, listener)
        with _journal(prepared) as journal:
            swept = _measure(prepared, journal, listener)
        profile = _profile(prepared, swept)
        for remark in profile.provenance.note.split("; "):
            listener.say(remark)
        path, picture = store(profile, settings.output)
        keep_samples(journal.path, path)
    return CalibrationResult(
        profile=profile,
        path=path,
        picture=picture,
        warnings=prepared.remarks,
        resumed_samples=swept.resumed_samples,
        unmeasured=swept.unmeasured,
        skipped=swept.skipped,
    )


def _place(settings: CalibrationSettings, address: Address) -> torch.device | None:
    """The device of this machine that the server runs on; None where --device names a known one."""
    name = settings.device or "auto"
    if name.partition(":")[0] not in LOCAL_DEVICES:
        find_device(name)
        return None
    if not address.local:
        raise InputError(
            f"{address} is not this machine, and its device cannot be seen from here",
            hint="Name it, as --device h100-sxm; `rooftree devices` lists all.",
        )
    return select_device(settings.device)


def _prepare(
    settings: CalibrationSettings,
    given: ServerSettings,
    device: torch.device | None,
    listener: CalibrationListener,
) -> PreparedServer:
    """Ask the server what it serves and caches, measure the peaks, and plan the sweep."""
    activity = observe()
    address = Address.parse(given.url)
    server = ServerClient(address, api_key=_api_key(given.api_key))
    models, version = server.models()
    model = _choose(models, given.model or settings.target, address, named=bool(given.model))
    server.model = model.name
    architecture = _architecture(settings.target, model, address)
    dtype = parse_dtype(settings.dtype, device or torch.device("cpu"))
    fingerprint_, peaks = _device(settings, device, dtype)
    subject = MeasuredSubject(
        device=fingerprint_,
        architecture=architecture,
        runtime=RuntimeSection(
            kind="url",
            dtype=dtype_name(dtype),
            attention=version,
            tensor_parallel=given.tensor_parallel,
        ),
    )
    listener.say(f"{architecture.name} at {address} ({version}) on {fingerprint_.name}")
    workload = ServedWorkload(
        server, vocab=architecture.vocab, seed=settings.seed, most_tokens=model.most_tokens
    )
    plan, remarks = _plan(settings, workload, on_cpu=fingerprint_.kind == "cpu")
    for remark in remarks:
        listener.say(remark)
    return PreparedServer(
        settings=settings,
        subject=subject,
        peaks=peaks,
        plan=plan,
        workload=workload,
        address=address,
        activity=activity,
        remarks=remarks,
    )


def _plan(
    settings: CalibrationSettings, workload: ServedWorkload, *, on_cpu: bool
) -> tuple[ServedPlan, tuple[str, ...]]:
    """The points that the server can take, and remarks on what it cannot. Raises InputError."""
    asked = settings.contexts or (CPU_CONTEXTS if on_cpu else GPU_CONTEXTS)
    most_rows = (settings.max_nodes or MAX_NODES) + 1
    room = workload.most_context(most_rows)
    fitting = tuple(context for context in asked if room is None or context <= room)
    if not fitting:
        raise InputError(
            f"the server takes {room} cached tokens before {most_rows} new ones",
            hint="Choose smaller --contexts or --max-nodes.",
        )
    contexts, told = workload.aligned(fitting)
    if not told:
        workload.check_cache(sorted(contexts)[len(contexts) // 2])
    held_out, _ = workload.aligned(draw_contexts(contexts, settings.seed))
    batches = settings.batches or BATCHES
    together = workload.find_most_together(batches)
    remarks = []
    if contexts != tuple(sorted(asked)):
        blocks = "as the server tells" if told else "of 128 tokens"
        listed = ", ".join(map(str, contexts))
        remarks.append(f"contexts in whole blocks of its cache ({blocks}): {listed}")
    if together < max(batches):
        remarks.append(f"it runs {together} requests at once: larger batches are left out")
    plan = ServedPlan(
        contexts=contexts,
        batches=tuple(batch for batch in batches if batch <= together),
        most_rows=most_rows,
        held_out_contexts=held_out,
        seed=settings.seed,
    )
    return plan, tuple(remarks)


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key or not key.isprintable():
        raise InputError(
            f"the environment variable {shown(variable)} holds no API key",
            hint="--api-key takes the name of a variable, never the key.",
        )
    return key


def _choose(
    models: list[ServedModel], name: str | None, address: Address, *, named: bool
) -> ServedModel:
    """The model called `name`, or the only one. Raises InputError that lists those served."""
    for model in models:
        if model.name == name:
            return model
    if len(models) == 1 and not named:
        return models[0]
    listed = ", ".join(shown(model.name) for model in models[:8]) or "none"
    wanted = f"no model {shown(name)}" if name else f"{len(models)} models"
    raise InputError(f"{address} serves {wanted}", hint=f"Give --model, one of: {listed}")


def _architecture(target: str | None, model: ServedModel, address: Address) -> ModelArchitecture:
    """The target's, from --target, or from the server's name for it.

    A name that came from a server is never looked up on the hub, and as a folder only where the
    server is this machine.
    """
    if target is not None:
        return resolve_target(target, hub=True).architecture
    try:
        if not address.local and os.path.exists(model.name):
            raise InputError(f"{model.name} is a folder")
        return resolve_target(model.name).architecture
    except InputError:
        raise InputError(
            f"{address} calls its model {shown(model.name)}, which is no known target",
            hint="Give its folder or hub id with --target.",
        ) from None


def _device(
    settings: CalibrationSettings, device: torch.device | None, dtype: torch.dtype
) -> tuple[DeviceFingerprint, PeaksSection]:
    """The device and its peaks: measured here, or a known device's datasheet."""
    if device is not None:
        return fingerprint(device), peaks_of(device, dtype)
    spec = find_device(str(settings.device))
    peaks = PeaksSection(
        source="datasheet",
        flops_per_s=spec.peak_flops_per_s,
        bytes_per_s=spec.peak_bytes_per_s,
    )
    named = DeviceFingerprint(kind="cuda", name=spec.name, memory_bytes=spec.memory_bytes)
    return named, peaks


def _journal(prepared: PreparedServer) -> Journal:
    """The journal of exactly this run."""
    plan, subject = prepared.plan, prepared.subject
    header = {
        "url": str(prepared.address),
        "device": subject.device.name,
        "target": subject.architecture.hash,
        "runtime": subject.runtime.model_dump(exclude_none=True),
        "contexts": list(plan.contexts),
        "batches": list(plan.batches),
        "most_rows": plan.most_rows,
        "seed": plan.seed,
    }
    name = f"{subject.architecture.hash}.{subject.runtime.dtype}.url.jsonl"
    path = user_directory() / "journals" / name
    return Journal(path, header, fresh=prepared.settings.fresh)


def _measure(
    prepared: PreparedServer, journal: Journal, listener: CalibrationListener
) -> SweepResult:
    """Sweep the points of the plan: the times of requests and streams, floor included."""
    plan, settings = prepared.plan, prepared.settings
    roofline = prepared.subject.roofline(prepared.peaks)
    tools = Instruments(
        timer=ReportTimer(),
        guard=ArrivalGuard(prepared.workload),
        rule=NoiseRule(min_samples=MIN_SAMPLES),
    )
    grid = AdaptiveGrid(plan.grid(), roofline)
    budget_s = settings.time_budget_s or BUDGET_S
    steering = Steering(
        budget_s=budget_s,
        limit_s=settings.time_limit_s,
        on_progress=listener.progress,
        more=lambda swept: grid.more(forward_times(swept, roofline).swept),
        doubt=lambda swept: grid.doubt(forward_times(swept, roofline).swept),
        on_doubt=tell_of_doubts(listener),
    )
    tasks = grid.first() + plan.plain() + plan.held_out()
    swept = run_sweep(tasks, prepared.workload, tools, journal, steering)
    report_sweep(swept, listener, budget_s)
    return swept


def _profile(prepared: PreparedServer, swept: SweepResult) -> Profile:
    """The profile of the forwards, with its error on the held-out points and its error bar."""
    subject = prepared.subject
    times = forward_times(swept, subject.roofline(prepared.peaks))
    measurement = Measurement(
        kind="measured",
        points=points_of(times.swept, "verify"),
        peaks=prepared.peaks,
        provenance=provenance_fields(swept, {}, prepared.activity)
        | {"source": f"HTTP, {prepared.address}, {subject.runtime.attention}"},
        sections={"stages": stages_section(times.swept)},
    )
    profile = make_profile(replace(subject, note="; ".join(_notes(times))), measurement)
    profile = with_held_out(profile, points_of(times.swept, "held_out"))
    error = 0.0 if profile.held_out is None else profile.held_out.error.mape
    provenance = profile.provenance.model_copy(update={"error_bar": times.error_bar(error)})
    return profile.model_copy(update={"provenance": provenance})


def _notes(times: ForwardTimes) -> list[str]:
    floor = times.floor
    return [
        f"taken out of each request: {floor.base_s * 1e3:.2f} ms and {floor.token_s * 1e9:.0f} ns "
        f"a token of context, known to {floor.error_s * 1e3:.2f} ms",
        "added from the roofline: the LM head of all rows, where the server computes one, up to "
        f"{times.lm_head_share:.1%} of a time",
        "several rows were timed for one sequence, several sequences in plain steps: anything "
        "beyond is extrapolated",
        "rows are a prompt's: an engine may run those of a draft by other kernels or graphs",
        "error bar: that of held-out points, of the floor and all of the LM head's share",
    ]
