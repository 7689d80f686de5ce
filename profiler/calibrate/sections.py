"""From the samples of a sweep to the sections of a profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from costmodel.calibration.choices import has_choices, likely_regret, standard_curves
from costmodel.calibration.points import ErrorSummary, Points
from costmodel.profile import schema
from costmodel.profile.profile import Profile
from decoder.drafters.base import Drafter
from decoder.profiling.startup import is_storable
from profiler.calibrate.sweep import SweepResult, Task


def points_of(swept: SweepResult, kind: str) -> Points:
    """The measured forwards of one kind (`verify` or `held_out`)."""
    measured = [(task, samples) for task, samples in swept.samples.items() if task.kind == kind]
    return Points(
        rows=[task.size for task, _ in measured],
        context=[task.context for task, _ in measured],
        batch=[task.batch for task, _ in measured],
        seconds=[samples.typical_s for _, samples in measured],
        mad_s=[np.nan if samples.mad_s is None else samples.mad_s for _, samples in measured],
        n=[samples.n for _, samples in measured],
    )


def stages_section(swept: SweepResult) -> schema.StagesSection:
    """The costs of a cycle beside draft and verification, and those of the prefill."""

    def one_row(task: Task) -> bool:
        return task.kind in ("verify", "plain") and task.size == 1

    stages = {"plain": columns_of(swept, one_row, batch="batch", context="context")}
    axes = {"prefill": "tokens", "commit": "tokens"}
    for kind in ("prefill", "build", "accept", "accept_sampled", "commit"):
        axis = {axes.get(kind, "nodes"): "size"}
        stages[kind] = columns_of(swept, lambda task, kind=kind: task.kind == kind, **axis)
    return schema.StagesSection.model_validate(stages)


def drafter_sections(swept: SweepResult, drafter: Drafter) -> dict[str, schema.DrafterSection]:
    """The drafter's cost by context, under its architecture hash; none that may not be stored."""
    columns = columns_of(swept, lambda task: task.kind == "draft", context="context")
    if columns is None or not is_storable(drafter):
        return {}
    section = schema.DrafterSection.model_validate({"name": drafter.name} | columns)
    return {drafter.architecture_hash: section}


def columns_of(
    swept: SweepResult, wanted: Callable[[Task], bool], **axes: str
) -> dict[str, Any] | None:
    """The columns of a section, in the order of its axes; None without a task that is wanted.

    axes  the field of a task that each axis of the section has
    """
    rows = [
        ([getattr(task, field) for field in axes.values()], samples)
        for task, samples in swept.samples.items()
        if wanted(task)
    ]
    rows.sort(key=lambda row: row[0])
    if not rows:
        return None
    return {
        **{axis: [place[number] for place, _ in rows] for number, axis in enumerate(axes)},
        "median_s": [samples.typical_s for _, samples in rows],
        "mad_s": [samples.mad_s for _, samples in rows],
        "n": [samples.n for _, samples in rows],
    }


def provenance_fields(swept: SweepResult, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the provenance section that the sweep and the machine's own fields give."""
    return {
        "samples": sum(samples.n for samples in swept.samples.values()),
        "discarded_samples": sum(len(samples.rejected) for samples in swept.samples.values()),
        "pace_spread": swept.pace_spread or None,
        "duration_s": round(swept.spent_s, 2),
        "sm_clock_hz": fields.get("gpu_sm_clock_hz"),
        "memory_clock_hz": fields.get("gpu_memory_clock_hz"),
        "temperature_c": fields.get("gpu_temperature_c"),
        "power_w": fields.get("gpu_power_w"),
        "clock_reasons": fields.get("gpu_clock_reasons", ()),
        "ecc": fields.get("gpu_ecc"),
        "busy_processes": [one["name"] for one in fields.get("busy_processes", ()) if one["name"]],
    }


def with_held_out(profile: Profile, points: Points) -> Profile:
    """The profile with its error on held-out points, and the regret where they leave a choice."""
    if len(points) == 0:
        return profile
    predicted_s = profile.verify_calibration().predict_s(points.rows, points.context, points.batch)
    linear_s = profile.linear_calibration().predict_s(points.rows, points.context, points.batch)
    held_out = schema.HeldOutSection(
        error=ErrorSummary.of(predicted_s, points.seconds),
        linear_error=ErrorSummary.of(linear_s, points.seconds),
        repeat_noise=float(np.median(points.median_error)),
        rows=points.rows.astype(int),
        context=points.context.astype(int),
        batch=points.batch.astype(int),
        measured_s=points.seconds,
        predicted_s=predicted_s,
    )
    section, included = None, has_choices(points)
    if included.any():
        regret = likely_regret(points.take(included), predicted_s[included])
        section = schema.RegretSection(
            mean=regret.mean,
            worst=regret.worst,
            interval=regret.interval,
            curves=len(standard_curves()),
            contexts=np.unique(points.context[included]).astype(int),
        )
    return profile.model_copy(update={"held_out": held_out, "regret": section})
