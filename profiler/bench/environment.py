"""What a result says of the machine, the profile and the models it belongs to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from costmodel.errors import ProfileError
from costmodel.profile import Profile
from costmodel.registry import ProfileStore, shipped_directory, user_directory
from decoder.device import fingerprint
from decoder.profiles import profile_key, soft_key
from decoder.target import Target
from profiler.bench.record import Environment, ProfileInfo
from profiler.device import collect, observe, warnings

_PLAIN_VALUES = (str, int, float, bool, type(None))
# What must not have changed when an interrupted run goes on.
_IDENTITY = ("torch_version", "transformers_version", "numba_version", "torch_threads")


def machine(device: torch.device) -> tuple[Environment, tuple[str, ...]]:
    """The machine as it is now, and what in it would spoil the numbers."""
    metadata, activity = collect(device.index or 0 if device.type == "cuda" else None), observe()
    found = fingerprint(device)
    environment = Environment(
        created_utc=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        device=found.name,
        threads=found.threads,
        instruction_set=found.instruction_set,
        fields={
            key: value
            for key, value in metadata.fields.items()
            if isinstance(value, _PLAIN_VALUES) and "uuid" not in key
        },
        absent=metadata.absent,
        busy=tuple(process.name for process in activity.processes),
    )
    return environment, warnings(metadata, activity)


def identity(environment: Environment) -> dict[str, Any]:
    """What of the machine an interrupted run must find again to go on."""
    return {
        "device": environment.device,
        "threads": environment.threads,
        "instruction_set": environment.instruction_set,
    } | {name: environment.fields.get(name) for name in _IDENTITY}


def describe_profile(profile: Profile, line: str) -> ProfileInfo:
    """The profile in a result; a cost of a drafter that was added does not change its hash."""
    content = {key: value for key, value in profile.as_dict().items() if key != "drafters"}
    text = json.dumps(content, sort_keys=True)
    return ProfileInfo(
        line=without_home(line),
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        kind=profile.provenance.kind,
        created_utc=profile.provenance.created_utc,
    )


def without_home(line: str) -> str:
    """A line for results, which others read: without where profiles lie on this machine."""
    places = {str(user_directory()): "$ROOFTREE_HOME", str(shipped_directory()): "calibrations"}
    for place, name in places.items():
        line = line.replace(place, name)
    return line


def stored_profile(target: Target, path: Path | None) -> tuple[Profile, str] | None:
    """The profile of this target and machine where no arm has asked for one; None without one."""
    store, key, soft = ProfileStore(), profile_key(target), soft_key(target)
    try:
        found = store.find(key, soft) if path is None else store.open(path, key, soft)
    except ProfileError:
        return None
    made = found.profile.provenance
    return found.profile, f"profile {found.path} ({made.kind}, {made.created_utc[:10]})"


def bandwidth_limit(profile: Profile | None) -> Callable[[int, int], float | None]:
    """Seconds that the plain steps of a text take at least: every weight and key read once.

    Takes the prompt's tokens and the new ones, the first of which the prefill gives.
    """
    if profile is None:
        return lambda prompt_tokens, new_tokens: None
    physical = profile.roofline("physical")

    def limit_s(prompt_tokens: int, new_tokens: int) -> float:
        contexts = prompt_tokens + np.arange(new_tokens - 1)
        return round(float(np.sum(physical.seconds(1, contexts))), 7)

    return limit_s
