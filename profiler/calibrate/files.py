"""The files of a calibration: its journal, profile, picture and raw samples."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from costmodel.catalog import slugify
from costmodel.errors import InputError, ProfileError
from costmodel.io import check_output, replacing
from costmodel.profile.profile import Profile
from costmodel.profile.store import ProfileStore, user_directory
from decoder.profiling.measured_profile import MeasuredSubject
from profiler.measure.journal import Journal
from profiler.report.profiles import plot_profile


def check_writable(output: Path | None) -> None:
    """Raise InputError, before anything is measured, when the profile could not be written."""
    if output is not None and output.suffix != ".yaml":
        raise InputError(
            f"the profile cannot be written to {output}",
            hint="Give --output a file name ending in .yaml.",
        )
    folder, hint = user_directory(), "Set ROOFTREE_HOME to a folder you can write to."
    if output is not None:
        folder, hint = output.absolute().parent, "Choose another place for --output."
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"cannot write to {folder}: {error.strerror or error}"
        raise InputError(reason, hint=hint).of_output() from error
    check_output(output or folder / "profile.yaml")


def open_journal(
    place: str, subject: MeasuredSubject, details: Mapping[str, Any], say: Callable[[str], None]
) -> Journal:
    """The journal of exactly this run; an unfinished run of other settings is dropped, and told.

    place  label of the device or address, which has one calibration at a time
    """
    runtime = subject.runtime.model_dump(exclude_none=True, mode="json")
    target = subject.architecture.hash
    header = {"device": subject.device.name, "target": target, "runtime": runtime, **details}
    kind, degree = subject.runtime.kind, f"tp{subject.runtime.tensor_parallel}"
    name = ".".join((slugify(place), target, subject.runtime.dtype, kind, degree, "jsonl"))
    journal = Journal(user_directory() / "journals" / name, header)
    if journal.dropped:
        say(f"dropped: {journal.dropped}")
    return journal


def device_label(device: torch.device) -> str:
    """`cpu` or `cuda-N`; `cuda-0` where the device was given without a number."""
    return "cpu" if device.type == "cpu" else f"cuda-{device.index or 0}"


def with_stored_drafters(profile: Profile, output: Path | None) -> Profile:
    """The profile with the costs of other drafters from the file that it replaces.

    Only a file of the same keys and versions gives them, and only costs that a calibration
    measured, each with its own date: those of a start are timed again at the next one.
    """
    try:
        if output is None:
            stored = ProfileStore([user_directory()]).find(profile.key).profile
        else:
            stored = Profile.from_yaml(output)
    except ProfileError:  # no profile yet, or an unreadable one
        return profile
    if stored.key.differences(profile.key):
        return profile
    for architecture_hash, drafter in stored.drafters.items():
        kind, created_utc = stored.drafter_origin(architecture_hash)
        if architecture_hash not in profile.drafters and kind == "measured":
            dated = drafter.model_copy(update={"kind": kind, "created_utc": created_utc})
            profile = profile.with_drafter(architecture_hash, dated)
    merged = stored.engine_drafters | profile.engine_drafters
    return profile.model_copy(update={"engine_drafters": merged})


def store(
    profile: Profile, output: Path | None = None, *, replace: bool = False
) -> tuple[Path, Path, str]:
    """Write the profile, and its picture beside it: both paths, and why it was put aside.

    output   a YAML file; None: where the lookup finds it
    replace  a stored profile that is better
    """
    path, reason = ProfileStore().put(profile, output, replace=replace)
    return path, plot_profile(profile, path.with_suffix(".png")), reason


def keep_samples(journal: Path, profile: Path) -> None:
    """Move the journal's samples to `<profile>.samples.jsonl`, all of them or none."""
    try:
        with replacing(profile.with_suffix(".samples.jsonl")) as part:
            shutil.copyfile(journal, part)
        journal.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(
            f"the profile {profile} is written, but not its raw samples: {error.strerror or error}",
            hint="Free some space and run the same command again; nothing is measured anew.",
        ) from error
