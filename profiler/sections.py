"""From the samples of a sweep to the sections of a profile."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodel.errors import ProfileError
from costmodel.fit import ErrorSummary, regret_at_contexts
from costmodel.points import Points
from costmodel.profile import HeldOutSection, Profile, RegretSection
from costmodel.registry import ProfileStore, user_directory
from costmodel.schema import ErrorSection
from costmodel.speculation import standard_curves
from costmodel.stages import (
    DrafterSection,
    NodesSection,
    PlainSection,
    StagesSection,
    TokensSection,
)
from decoder.drafters.base import Drafter
from profiler.device import Activity
from profiler.sweep import SweepResult
from profiler.timing import Samples

MIN_CHOICES = 4  # row counts of a context below which its regret says nothing


def with_held_out(profile: Profile, points: Points) -> Profile:
    """The profile with its error on points no fit has seen, and the regret at their contexts.

    Without points it stays as it is, and contexts with too few row counts are left out of
    the regret: it cannot be wrong where there is nothing to choose from.
    """
    if len(points) == 0:
        return profile
    predicted_s = profile.verify_calibration().predict_s(points.rows, points.context, points.batch)
    linear_s = profile.linear_calibration().predict_s(points.rows, points.context, points.batch)
    noise = points.median_error
    held_out = HeldOutSection(
        error=ErrorSection.of(ErrorSummary.of(predicted_s, points.seconds)),
        linear_error=ErrorSection.of(ErrorSummary.of(linear_s, points.seconds)),
        repeat_noise=float(np.median(noise)),
        rows=points.rows.astype(int),
        context=points.context.astype(int),
        batch=points.batch.astype(int),
        measured_s=points.seconds,
        predicted_s=predicted_s,
    )
    return profile.model_copy(
        update={"held_out": held_out, "regret": _regret_section(points, predicted_s)}
    )


def with_known_drafters(profile: Profile, output: Path | None) -> Profile:
    """The profile with the draft costs of other drafters from the file that it replaces.

    They are kept only where that file has the same key and versions and they were timed here,
    each with how and when that was.
    """
    try:
        if output is None:
            known = ProfileStore([user_directory()]).find(profile.key).profile
        else:
            known = Profile.from_yaml(output)
    except ProfileError:  # there is none, or none that can be read
        return profile
    if known.differences(profile.key, profile.soft_key):
        return profile
    for architecture_hash, drafter in known.drafters.items():
        kind, created_utc = known.drafter_origin(architecture_hash)
        if architecture_hash not in profile.drafters and kind in ("measured", "quick"):
            own = drafter.model_copy(update={"kind": kind, "created_utc": created_utc})
            profile = profile.with_drafter(architecture_hash, own)
    return profile


def _regret_section(points: Points, predicted_s: NDArray[np.float64]) -> RegretSection | None:
    contexts, rows = np.unique(points.context, return_counts=True)
    wide = contexts[rows >= MIN_CHOICES]
    if len(wide) == 0:
        return None
    kept = np.isin(points.context, wide)
    regret = regret_at_contexts(points.take(kept), predicted_s[kept])
    return RegretSection(
        mean=regret.mean,
        worst=regret.worst,
        curves=len(standard_curves()),
        contexts=wide.astype(int),
    )


def points_of(swept: SweepResult, kind: str) -> Points:
    """The measured forwards of one kind (`verify` or `held_out`)."""
    taken = [(task, samples) for task, samples in swept.samples.items() if task.kind == kind]
    return Points(
        rows=[task.size for task, _ in taken],
        context=[task.context for task, _ in taken],
        batch=[task.batch for task, _ in taken],
        seconds=[samples.median_s for _, samples in taken],
        mad_s=[_number(samples.mad_s) for _, samples in taken],
        n=[samples.n for _, samples in taken],
    )


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _columns(rows: list[tuple[int, Samples]]) -> dict[str, Any]:
    return {
        "median_s": [samples.median_s for _, samples in rows],
        "mad_s": [samples.mad_s for _, samples in rows],
        "n": [samples.n for _, samples in rows],
    }


def _of_kind(swept: SweepResult, kind: str, axis: str) -> list[tuple[int, Samples]]:
    return sorted(
        (
            (getattr(task, axis), samples)
            for task, samples in swept.samples.items()
            if task.kind == kind
        ),
        key=lambda row: row[0],
    )


def stages_section(swept: SweepResult) -> StagesSection:
    """Everything in a cycle beside draft and verification."""

    def section(kind: str, section_type: Any) -> Any:
        rows = _of_kind(swept, kind, "size")
        if not rows:
            return None
        return section_type(**{section_type.axis: [size for size, _ in rows]}, **_columns(rows))

    plain = sorted(
        (
            (task.batch, task.context, samples)
            for task, samples in swept.samples.items()
            if task.kind in ("verify", "plain") and task.size == 1
        ),
        key=lambda row: row[:2],
    )
    return StagesSection(
        plain=PlainSection(
            batch=[batch for batch, _, _ in plain],
            context=[context for _, context, _ in plain],
            **_columns([(context, samples) for _, context, samples in plain]),
        )
        if plain
        else None,
        prefill=section("prefill", TokensSection),
        build=section("build", NodesSection),
        accept=section("accept", NodesSection),
        commit=section("commit", TokensSection),
    )


def drafter_sections(swept: SweepResult, drafter: Drafter) -> dict[str, DrafterSection]:
    """The drafter's cost by context, under its architecture hash."""
    rows = _of_kind(swept, "draft", "context")
    if not rows:
        return {}
    section = DrafterSection(
        name=drafter.name, context=[context for context, _ in rows], **_columns(rows)
    )
    return {drafter.architecture_hash: section}


def provenance_fields(
    swept: SweepResult, fields: Mapping[str, Any], activity: Activity
) -> dict[str, Any]:
    """What the provenance section says of how the sweep went."""
    return {
        "samples": sum(samples.n for samples in swept.samples.values()),
        "discarded_samples": sum(len(samples.rejected) for samples in swept.samples.values()),
        "duration_s": round(swept.spent_s, 2),
        "sm_clock_hz": fields.get("gpu_sm_clock_hz"),
        "memory_clock_hz": fields.get("gpu_memory_clock_hz"),
        "temperature_c": fields.get("gpu_temperature_c"),
        "power_w": fields.get("gpu_power_w"),
        "clock_reasons": fields.get("gpu_clock_reasons", ()),
        "ecc": fields.get("gpu_ecc"),
        "busy_processes": [process.name for process in activity.processes if process.name],
    }
