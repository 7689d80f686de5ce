"""One measurement of a device at a time."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from costmodel.errors import DeviceError


def lock_directory() -> Path:
    """Where the locks lie: one place a user and machine, whatever ROOFTREE_HOME says."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return Path(tempfile.gettempdir()) / f"rooftree-{user}"


@contextlib.contextmanager
def device_lock(device: str, directory: Path | None = None) -> Iterator[None]:
    """Hold the lock of `device` (any label that identifies it) for the body.

    Raises `DeviceError` at once, naming the other process and its start, when it is held. The
    system releases it when the process ends, however it ends.
    """
    place = lock_directory() if directory is None else directory
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", device)
    owner_file = place / f"{name}.owner"
    lock = FileLock(place / f"{name}.lock")
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise DeviceError(
            f"another measurement of {device} is running{_owner(owner_file)}",
            hint="Two at once would disturb each other: wait for it or stop it.",
        ) from None
    except OSError as error:
        raise DeviceError(
            f"cannot lock {device} in {place}: {error.strerror or error}",
            hint="Set TMPDIR to a directory you can write to.",
        ) from error
    try:
        with contextlib.suppress(OSError):
            owner_file.write_text(json.dumps({"pid": os.getpid(), "started": _now()}))
        yield
    finally:
        with contextlib.suppress(OSError):
            owner_file.unlink(missing_ok=True)
        lock.release()


def _owner(path: Path) -> str:
    try:
        owner = json.loads(path.read_text())
        return f" (process {int(owner['pid'])}, since {owner['started']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
