"""Checks of names and of turns before anything heavy is imported."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from costmodel.catalog import find_target
from costmodel.errors import DeviceError, InputError, shown
from costmodel.io import folder_of
from costmodel.plugins import plugin_names
from decoder.extensions import POLICIES, REFERENCE

DEVICE = re.compile(r"auto|cpu(:0)?|cuda(:\d{1,3})?", re.ASCII)
GPU_FILES = ("nvidia*", "nvhost*", "nvmap", "nvgpu*", "kfd", "dxg")  # in /dev, of all that CUDA has
POLICY_NAMES = "bastion, fixed:N, chain or plain"
FIXED = re.compile(r"fixed:([1-9]\d{0,8})", re.ASCII)


def has_gpu() -> bool:
    """Whether there may be a GPU; only Linux can say that there is none."""
    return sys.platform != "linux" or any(any(Path("/dev").glob(one)) for one in GPU_FILES)


def check_device(name: str) -> None:
    """Raise DeviceError where no device can have this name here."""
    if DEVICE.fullmatch(name) is None:
        raise DeviceError(f"{shown(name)} is not a device", hint="Use cpu, cuda or cuda:N.")
    if name.startswith("cuda") and not has_gpu():
        raise no_cuda()


def no_cuda() -> DeviceError:
    return DeviceError(
        "no CUDA device is available to torch",
        hint="Use --device cpu, or install a CUDA build of torch and a driver.",
    )


def check_target(name: str) -> None:
    """Raise InputError for a name that is no folder, no known target and no hub id."""
    if not name.strip():
        raise InputError(
            "the target's name is empty", hint="Give a folder, a hub id or a known target."
        )
    if folder_of(name) is not None:
        return
    check_path(name)
    if "/" in name:
        return
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    if not (hub / f"models--{name}").is_dir():  # an old name without an owner, as gpt2
        find_target(name)


def check_path(name: str) -> None:
    """Raise InputError for a path, where there is no folder of this name."""
    if is_path(name):
        raise InputError(f"there is no folder {name}", hint="Check the path of the target.")


def is_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def check_policy(text: str) -> None:
    """Raise InputError for a name of no policy; other packages' own names are not imported."""
    if text in ("bastion", "chain", "plain") or FIXED.fullmatch(text):
        return
    if text.partition(":")[0] == "fixed":
        hint = "Write fixed:N with N of 1 or more, as fixed:16."
        raise InputError(f"'{text}' is not a policy", hint=hint)
    extensions = plugin_names(POLICIES)
    named = text in extensions or text.partition(":")[0] in extensions
    if not named and REFERENCE.fullmatch(text) is None:
        names = ", ".join((POLICY_NAMES, *extensions))
        raise InputError(
            f"'{text}' is not a policy", hint=f"Use {names}, or package:Class for one of your own."
        )


def chat_turns(turns: Sequence[Any], where: str) -> list[dict[str, Any]]:
    """Turns with a text `role` and `content`, its parts joined. Raises InputError with `where`."""
    joined = []
    for number, turn in enumerate(turns, 1):
        fields = turn if isinstance(turn, Mapping) else {}
        content = fields.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
        if not all(isinstance(text, str) for text in (fields.get("role"), *texts)):
            raise InputError(
                f"{where}: turn {number} has no text `role` and `content`",
                hint='Write turns as {"role": "user", "content": "..."}.',
            )
        joined.append({**fields, "content": "".join(map(str, texts))})
    return joined
