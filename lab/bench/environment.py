"""The machine and the profile as a result records them."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from costmodel.errors import ProfileError
from costmodel.io import now_utc, shipped_directory
from costmodel.profile.profile import Profile
from costmodel.profile.store import ProfileStore, user_directory
from decoder.device import fingerprint, select_device
from decoder.model.target import Target
from decoder.profiling.measured_profile import profile_key
from lab.bench.record import Environment, ProfileInfo
from profiler.measure.machine import collect, warnings


def machine(device: torch.device) -> tuple[Environment, tuple[str, ...]]:
    """The machine as it is now, and warnings about its state."""
    metadata = collect(device.index or 0 if device.type == "cuda" else None)
    keys = fingerprint(device)
    seen = Environment(
        created_utc=now_utc(),
        device=keys.name,
        threads=keys.threads,
        instruction_set=keys.instruction_set,
        fields={
            key: value
            for key, value in metadata.items()
            if isinstance(value, str | int | float | bool | None) and "uuid" not in key
        },
        absent=metadata["absent"],
        busy=tuple(process["name"] for process in metadata.get("busy_processes", ())),
    )
    return seen, warnings(metadata)


def environment(device_name: str | None = None) -> dict[str, Any]:
    """The machine, its state and the versions of the software, as studies record them."""
    seen, _ = machine(select_device(device_name))
    return {
        "created_utc": seen.created_utc, "device": seen.device, "threads": seen.threads,
        "instruction_set": seen.instruction_set, "system": platform.system(),
        "load_average": os.getloadavg(), "busy": list(seen.busy),
        **{name: value for name, value in seen.fields.items() if value is not None},
    }  # fmt: skip


def describe_profile(profile: Profile, line: str) -> ProfileInfo:
    """The profile for a result. Its hash leaves out drafter costs, which a run may add."""
    content = {key: value for key, value in profile.as_dict().items() if key != "drafters"}
    text = json.dumps(content, sort_keys=True)
    return ProfileInfo(
        line=without_home(line),
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        kind=profile.provenance.kind,
        created_utc=profile.provenance.created_utc,
    )


def without_home(line: str) -> str:
    """A line for a result, without the local paths of profiles."""
    places = {str(user_directory()): "$ROOFTREE_HOME", str(shipped_directory()): "calibrations"}
    for place, name in places.items():
        line = line.replace(place, name)
    return line


def stored_profile(target: Target) -> tuple[Profile, str] | None:
    """The stored profile of this target and machine and a line about it; None without one."""
    try:
        match = ProfileStore().find(profile_key(target))
    except ProfileError:
        return None
    made = match.profile.provenance
    return match.profile, f"profile {match.path} ({made.kind}, {made.created_utc[:10]})"


def bandwidth_limit(profile: Profile | None) -> Callable[[int, int], float | None]:
    """A function (prompt tokens, new tokens) -> least seconds of a text's plain steps.

    Each step reads every weight and key once at the profile's peaks. The prefill gives the
    first new token. The function returns None without a profile.
    """
    if profile is None:
        return lambda prompt_tokens, new_tokens: None
    physical = profile.roofline("physical")

    def limit_s(prompt_tokens: int, new_tokens: int) -> float:
        contexts = prompt_tokens + np.arange(new_tokens - 1)
        return round(float(np.sum(physical.seconds(1, contexts))), 7)

    return limit_s
