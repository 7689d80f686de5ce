"""The profile for a running vLLM engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from costmodel.errors import ProfileError
from costmodel.profile.profile import Profile
from costmodel.profile.store import ProfileStore, user_directory
from integrations.vllm.configuration import differing_keys

PROFILE_VARIABLE = "ROOFTREE_PROFILE"
PROFILE_OPTION = "rooftree_profile"  # in vLLM's --additional-config


def find_profile(config: Any) -> tuple[Profile, Path]:
    """The profile for an engine's `VllmConfig`, and its file. Raises ProfileError."""
    options = config.additional_config if isinstance(config.additional_config, dict) else {}
    named = options.get(PROFILE_OPTION) or os.environ.get(PROFILE_VARIABLE)
    if named:
        path = Path(named)
        profile = Profile.from_yaml(path)
        differing = differing_keys(profile.key, config)
        if differing:
            raise ProfileError(f"{path} is not for this engine: {'; '.join(differing)}")
        return profile, path
    for stored in ProfileStore([user_directory()]).list():
        if stored.profile is not None and not differing_keys(stored.profile.key, config):
            return stored.profile, stored.path
    raise ProfileError(
        f"no profile in {user_directory()} is for this engine and target",
        hint="Measure one with `rooftree calibrate vllm`",
    )
