"""The config of a model on the Hugging Face hub: from the local cache, else fetched."""

from __future__ import annotations

import os
import re
import urllib.error
import urllib.request
from functools import cache
from pathlib import Path
from typing import Any

from costmodel.errors import InputError
from costmodel.io import NotJson, parse_json, read_bytes

TIMEOUT_S = 10.0
MAX_CONFIG_BYTES = 4_000_000
_HINT = "Check the name and the network, or give the path of its config.json"


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form owner/model."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", name) is not None


@cache
def hub_config(name: str) -> Any:
    """The config.json of the model `owner/model`, parsed.

    It is taken from the hub's cache on this machine where it is there; else it is fetched (a few
    kilobytes, no weights), which needs a network, and for a gated model a token. Raises
    InputError that says which of them is missing.
    """
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, "config.json")
    raw = read_bytes(Path(cached), InputError) if isinstance(cached, str) else _fetch(name)
    try:
        return parse_json(raw, finite=False)
    except NotJson as failure:
        raise InputError(f"the config.json of {name} is not JSON: {failure}") from None


def _fetch(name: str) -> bytes:
    from huggingface_hub import constants, get_token

    problem = f"'{name}' is no folder and no known target"
    if constants.HF_HUB_OFFLINE:
        raise InputError(f"{problem}, and HF_HUB_OFFLINE forbids to ask the hub", hint=_HINT)
    endpoint = os.environ.get("HF_ENDPOINT", constants.ENDPOINT).rstrip("/")
    request = urllib.request.Request(f"{endpoint}/{name}/resolve/main/config.json")
    token = get_token()
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            raw: bytes = response.read(MAX_CONFIG_BYTES + 1)
    except urllib.error.HTTPError as failure:
        raise InputError(
            f"{problem}, and the hub does not give its config (HTTP {failure.code}: it has none,"
            " or the model is gated)",
            hint="Check the name, log in with `hf auth login`, or give the path of its config.json",
        ) from None
    except (OSError, ValueError) as failure:
        reason = getattr(failure, "reason", failure)
        raise InputError(
            f"{problem}, and the hub cannot be asked for its config without a network ({reason})",
            hint=_HINT,
        ) from None
    if len(raw) > MAX_CONFIG_BYTES:
        raise InputError(f"the config.json of {name} is larger than a config can be")
    return raw
