"""Profiles as a person reads them: finding one by name, one line of it, and its page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np

from costmodel.errors import InputError, ProfileError
from costmodel.profile import Profile
from costmodel.registry import ProfileStore, StoredProfile
from profiler.render import print_table

SHOWN_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def list_record(stored: StoredProfile) -> dict[str, Any]:
    """The fields of one profile that `profiles list` gives; only path and problem if broken."""
    record: dict[str, Any] = {"path": str(stored.path), "problem": stored.problem}
    profile = stored.profile
    if profile is None:
        return record
    held_out, regret = profile.held_out, profile.regret
    return record | {
        "device": profile.device.name,
        "target": profile.target.name,
        "architecture_hash": profile.target.architecture_hash,
        "dtype": profile.runtime.quantization or profile.runtime.dtype,
        "runtime": profile.runtime.kind,
        "tensor_parallel": profile.runtime.tensor_parallel,
        "provenance": profile.provenance.kind,
        "created_utc": profile.provenance.created_utc,
        "held_out_median": None if held_out is None else held_out.error.median,
        "regret_worst": None if regret is None else regret.worst,
    }


def find_profile(name: str) -> tuple[Path, Profile]:
    """The profile at the path `name`, or the only stored one whose path contains it.

    Raises `ProfileError` when it cannot be used, `InputError` when none or several fit.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path, Profile.from_yaml(path)
    stored = ProfileStore().list()
    fits = [item.path for item in stored if name.lower() in str(item.path).lower()]
    if len(fits) == 1:
        return fits[0], Profile.from_yaml(fits[0])
    if fits:
        shown = ", ".join(str(fit) for fit in fits[:4]) + (", ..." if fits[4:] else "")
        raise InputError(f"'{name}' fits {len(fits)} profiles: {shown}", hint="Give more of it.")
    raise InputError(
        f"'{name}' is neither a file nor part of a stored profile's path",
        hint="`rooftree profiles list` shows what there is.",
    )


def problem_of(path: Path) -> str:
    """Why the profile at `path` cannot be used; empty when it can."""
    try:
        Profile.from_yaml(path).verify_calibration()
    except ProfileError as error:
        return error.problem
    return ""


def print_profile(path: Path, profile: Profile) -> None:
    """The profile on stdout: what it is, how good it is, and what a verification costs."""
    for label, text in _facts(path, profile):
        click.echo(f"{label:<12}{text}")
    contexts = _contexts(profile)
    columns = ["rows", *(f"context {context}" for context in contexts)]
    calibration = profile.verify_calibration()
    rows = np.array([count for count in SHOWN_ROWS if count <= _most_rows(profile)])
    predicted = [calibration.predict_s(rows, context, 1) for context in contexts]
    table = [
        [int(count), *(f"{1e3 * seconds[index]:.2f}" for seconds in predicted)]
        for index, count in enumerate(rows)
    ]
    click.echo("\nOne verification forward, ms:")
    print_table(columns, table)


def _facts(path: Path, profile: Profile) -> list[tuple[str, str]]:
    device, runtime, provenance = profile.device, profile.runtime, profile.provenance
    linear = profile.calibration.linear
    facts = [
        ("profile", str(path)),
        ("device", f"{device.name}, {device.memory_bytes / 2**30:.1f} GiB{_cpu(profile)}"),
        ("target", f"{profile.target.name} ({profile.target.architecture_hash})"),
        (
            "runtime",
            f"{runtime.kind}, {runtime.quantization or runtime.dtype}, attention "
            f"{runtime.attention}, tensor-parallel {runtime.tensor_parallel}, "
            f"torch {runtime.torch or 'unknown'}",
        ),
        (
            "provenance",
            f"{provenance.kind}, {provenance.created_utc}, {provenance.points} points, "
            f"{provenance.samples} samples" + (f"; {provenance.note}" if provenance.note else ""),
        ),
        (
            "linear",
            f"{linear.slope:.3g} x roofline + {1e3 * linear.intercept_s:.3g} ms; RMSE "
            f"{1e3 * linear.rmse_before_s:.3g} ms before, {1e3 * linear.rmse_after_s:.3g} after",
        ),
        ("selected", profile.calibration.selected),
    ]
    if profile.held_out is not None:
        error = profile.held_out.error
        facts.append(("held out", f"error {error.median:.1%} median, {error.worst:.1%} worst"))
    if profile.regret is not None:
        facts.append(
            (
                "regret",
                f"choosing the tree size from it costs {profile.regret.mean:.2%} of tokens/s on "
                f"average, {profile.regret.worst:.2%} at worst",
            )
        )
    drafters = [
        drafter.name
        + (f" ({drafter.kind}, {drafter.created_utc[:10]})" if drafter.created_utc else "")
        for drafter in profile.drafters.values()
    ]
    return [*facts, ("drafters", ", ".join(drafters) or "none timed")]


def _cpu(profile: Profile) -> str:
    if profile.device.kind != "cpu":
        return ""
    return f", {profile.device.threads} threads, {profile.device.instruction_set}"


def _contexts(profile: Profile) -> list[int]:
    """The measured contexts of batch 1, at most five of them; one when nothing was measured."""
    if profile.surface is None:
        return [1024]
    measured = sorted(set(profile.surface.context))
    picked = np.linspace(0, len(measured) - 1, min(5, len(measured))).round().astype(int)
    return [measured[index] for index in picked]


def _most_rows(profile: Profile) -> int:
    return max(profile.surface.rows) if profile.surface is not None else SHOWN_ROWS[-1]
