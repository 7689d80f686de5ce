"""A calibration from beginning to end: prepare a source, measure its points, write the profile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from costmodel.profile.profile import Profile
from decoder.profiling.measured_profile import make_profile
from profiler.calibrate import files
from profiler.calibrate.decoder import DecoderSource
from profiler.calibrate.points import AdaptiveGrid
from profiler.calibrate.sections import points_of, provenance_fields, stages_section, with_held_out
from profiler.calibrate.source import CalibrationSettings, CalibrationSource
from profiler.calibrate.sweep import SweepControl, SweepResult, Task, run_sweep
from profiler.measure.lock import device_lock
from profiler.measure.machine import collect, warnings

UNSTEADY = 0.05  # spread of the machine's pace above which it is reported
LEAST_LIMIT_S = 10.0  # of a default limit, however long the preparation took


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationResult:
    """The profile, its files, and what a user should know about the run.

    aside            why a stored profile stayed in its place, and this one was put aside
    resumed_samples  samples taken over from an interrupted run
    unmeasured       tasks without a sample when the time budget was spent
    skipped          tasks that did not fit into memory, with the reason
    """

    profile: Profile
    path: Path
    picture: Path
    aside: str
    warnings: tuple[str, ...]
    resumed_samples: int
    unmeasured: tuple[Task, ...]
    skipped: Mapping[Task, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationListener:
    """Callbacks for messages, and for the share that is done with a few words."""

    say: Callable[[str], None] = lambda text: None
    progress: Callable[[float, str], None] = lambda share, state: None


def calibrate(
    settings: CalibrationSettings | None = None,
    listener: CalibrationListener = CalibrationListener(),
    source: CalibrationSource | None = None,
) -> CalibrationResult:
    """Measure one target on one device, and store its profile, picture and raw samples.

    An interrupted run keeps its samples: the next call with the same settings resumes it.

    source  what is measured; None: this decoder
    Raises InputError, DeviceError, DrafterError, MeasurementError or ProfileError.
    """
    settings = settings or CalibrationSettings()
    source = source or DecoderSource(settings)
    files.check_writable(settings.output)
    with device_lock(source.lock):
        # Prepare: look at the machine, load the target, and plan the points.
        machine = collect(source.cuda_index)
        notes = warnings(machine)
        ready = source.prepare(listener.say)
        for note in notes:
            listener.say(f"warning: {note}")

        # Measure: a few points, then more where the held-out points are not yet predicted.
        grid = AdaptiveGrid(ready.grid, ready.subject.roofline(ready.peaks), ready.held_out)
        limit_s = settings.time_budget_s
        if limit_s is None:
            prepared_s = time.perf_counter() - ready.loaded_s
            limit_s = max(ready.limit_s - prepared_s, LEAST_LIMIT_S)
        control = SweepControl(
            limit_s=limit_s,
            on_progress=listener.progress,
            more=lambda swept: grid.more(ready.forwards(swept)),
            again=lambda swept: grid.again(ready.forwards(swept)),
            on_state=lambda reason: listener.say(f"the machine is busy ({reason}): waiting"),
        )
        with files.open_journal(source.lock, ready.subject, ready.journal, listener.say) as journal:
            listener.say(
                f"measuring takes at most {limit_s:.0f} s, less where choices are soon certain"
            )
            tasks = grid.first() + ready.fixed
            swept = run_sweep(tasks, ready.workload, ready.instruments, journal, control)
        for line in told(swept):
            listener.say(line)

        # Write: fit the calibrations, check them on the held-out points, and store the files.
        forwards = ready.forwards(swept)
        added = source.additions(swept)
        state = machine | ready.instruments.guard.summary()
        profile = make_profile(
            added.subject,
            "measured",
            points_of(forwards, "verify"),
            ready.peaks,
            provenance_fields(swept, state) | dict(added.provenance),
            stages=stages_section(forwards),
            **added.sections,
        )
        for step in profile.calibration.warnings:
            listener.say(f"warning: {step}")
        profile = with_held_out(profile, points_of(forwards, "held_out"))
        if added.error_bar is not None and profile.held_out is not None:
            error_bar = {"error_bar": added.error_bar(profile.held_out.error.mape)}
            provenance = profile.provenance.model_copy(update=error_bar)
            profile = profile.model_copy(update={"provenance": provenance})
        profile = files.with_stored_drafters(profile, settings.output)
        path, picture, aside = files.store(profile, settings.output, replace=settings.replace)
        files.keep_samples(journal.path, path)
    return CalibrationResult(
        profile=profile,
        path=path,
        picture=picture,
        aside=aside,
        warnings=notes + ready.warnings + added.warnings + profile.calibration.warnings,
        resumed_samples=swept.resumed_samples,
        unmeasured=swept.unmeasured,
        skipped=swept.skipped,
    )


def told(swept: SweepResult) -> Iterator[str]:
    """What the profile itself does not show of a sweep, a line each."""
    if swept.resumed_samples:
        yield f"went on from {swept.resumed_samples} samples of an unfinished run"
    if swept.damaged_lines:
        yield f"left out {swept.damaged_lines} damaged samples in the journal of an unfinished run"
    if swept.pace_spread > UNSTEADY:
        yield (
            f"the machine's pace varied by {swept.pace_spread:.0%}: times are corrected to its "
            "typical pace, and would be more certain on a quiet machine"
        )
    if drafts := sum(task.kind == "draft" for task in swept.unmeasured):
        yield (
            f"the drafter's cost may be left out of the profile: {drafts} of its points did not "
            "fit the time budget; run again with a larger --time-budget"
        )
    for task, reason in swept.skipped.items():
        place = f"{task.size} at context {task.context}, batch {task.batch}"
        yield f"skipped {task.kind} of {place}: {reason}"
