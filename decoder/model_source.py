"""Where a target's files are, and what its config says: a folder, the hub's cache or the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    StrictDataclassError,
)
from safetensors import SafetensorError
from transformers import AutoConfig

from costmodel.errors import InputError, RooftreeError
from costmodel.targets import find_target
from decoder.demo_model import DEMO_NAME, demo_model_folder

HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")

# What transformers raises for a folder with damaged, missing or contradictory files.
BROKEN_FILES = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ImportError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
)


def weights_source(name: str, download: bool) -> str | None:
    """The folder or hub id that holds real weights, or None.

    download  whether the hub may be asked for weights not found locally
    Raises InputError for a folder that is not there and a name that nothing can have.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return str(folder) if any(folder.glob("*.safetensors")) else None
    if _looks_like_path(name):
        raise InputError(f"there is no folder {name}", hint="Check the path of the target.")
    label = _canonical_name(name)
    if label == DEMO_NAME and (demo_model_folder() / "config.json").is_file():
        return str(demo_model_folder())
    return _hub_source(label, download)


def read_config(source: str) -> Any:
    """The config of a model's folder or hub id; InputError where it cannot be read."""
    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        raise InputError(f"{source} holds no config.json", hint="Give a Hugging Face model folder.")
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False)
    except BROKEN_FILES as error:
        raise InputError(
            f"cannot read the config of {source}: {first_reason(error)}",
            hint="Give a Hugging Face model folder of a dense decoder (Llama, Qwen, Mistral, ...).",
        ) from error


def label_of(name: str) -> str:
    """What a model is called: its folder's name, or its full name."""
    folder = Path(name).expanduser()
    return folder.resolve().name if folder.is_dir() else _canonical_name(name)


def first_reason(error: BaseException) -> str:
    """An error's first line, or two where the first only announces the second."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    taken = lines[:2] if lines[0].endswith(":") else lines[:1]
    return " ".join(taken).rstrip(".")


def _hub_source(name: str, download: bool) -> str | None:
    """The local copy of a hub model, fetched first where asked for."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(name, allow_patterns=HUB_FILES, local_files_only=True)
        if any(Path(folder).glob("*.safetensors")):
            return folder
    except HFValidationError as error:
        raise InputError(
            f"'{name}' is neither a folder, a known target nor a hub id",
            hint="Known targets are listed in calibrations/targets.yaml.",
        ) from error
    except LocalEntryNotFoundError:
        pass
    if not download:
        return None
    try:
        return snapshot_download(name, allow_patterns=HUB_FILES)
    except (HfHubHTTPError, OSError) as error:
        raise InputError(
            f"'{name}' is no folder here, and the hub does not give it: {first_reason(error)}",
            hint="Check the name and the network, give a model folder, or run "
            "`rooftree demo-model` for a small real model.",
        ) from error


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def _canonical_name(name: str) -> str:
    """A known target's full name for its short one; other names unchanged."""
    try:
        return find_target(name).architecture.name
    except RooftreeError:
        return name
