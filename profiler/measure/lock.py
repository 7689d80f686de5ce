"""The lock of a device, so that no two measurements disturb each other."""

from __future__ import annotations

import contextlib
import errno
import getpass
import json
import os
import platform
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from costmodel.errors import DeviceError
from costmodel.io import file_lock, parse_json, read_bytes
from costmodel.profile.store import user_directory

MOST_PID = 1 << 31
OWNER_BYTES = 1000


def lock_directory() -> Path:
    """The folder of this user's locks on this machine, whatever ROOFTREE_HOME is."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return Path(tempfile.gettempdir()) / f"rooftree-{user}"


@contextlib.contextmanager
def device_lock(device: str, directory: Path | None = None) -> Iterator[None]:
    """Hold the lock of `device` (any label that identifies it) during the body.

    directory  of the lock [default: that of the user on this machine, and a second one in the
               data directory, for processes that share it under two TMPDIRs]

    Raises DeviceError at once when another process holds the lock, with that process and its
    start, and where others could write into the directory. The system releases the lock when
    the process ends, however it ends.
    """
    with contextlib.ExitStack() as locks:
        for place in _places(device, directory):
            try:
                _make_private(place.parent)
                handle = locks.enter_context(file_lock(place, wait_s=0))
            except BlockingIOError:
                raise DeviceError(
                    f"another measurement of {device} is running{_owner(place)}",
                    hint="Two at once would disturb each other: wait for it or stop it.",
                ) from None
            except OSError as error:
                raise DeviceError(
                    f"cannot lock {device} in {place.parent}: {error.strerror or error}",
                    hint="Set TMPDIR and ROOFTREE_HOME to directories of your own.",
                ) from error
            _write_owner(handle)
        yield


def _places(device: str, directory: Path | None) -> list[Path]:
    """The lock files of a device."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", device)[:150]
    if directory is not None:
        return [directory / f"{name}.lock"]
    places = [lock_directory() / f"{name}.lock"]
    home = user_directory()
    with contextlib.suppress(OSError):  # where nothing can be written, nothing can be disturbed
        home.mkdir(parents=True, exist_ok=True)
        if os.access(home, os.W_OK):  # several machines may share it
            places.append(home / "locks" / f"{platform.node()[:50]}.{name}.lock")
    return places


def _make_private(folder: Path) -> None:
    """Make the folder, or check that nobody else can put anything into it. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise OSError(errno.EPERM, "it is not a directory of your own")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(errno.EPERM, "others may write into it")


def _write_owner(handle: int) -> None:
    """Write this process into its lock file, for others that find it locked."""
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    with contextlib.suppress(OSError):  # the lock holds all the same
        os.truncate(handle, 0)
        os.pwrite(handle, json.dumps({"pid": os.getpid(), "started": started}).encode(), 0)


def _owner(place: Path) -> str:
    """The process that holds a lock, in words; empty where its file does not say."""
    try:
        owner = parse_json(read_bytes(place, DeviceError, most_bytes=OWNER_BYTES))
        pid, started = owner["pid"], owner["started"]
    except (DeviceError, ValueError, LookupError, TypeError):
        return ""
    if type(pid) is not int or not 0 < pid < MOST_PID or not isinstance(started, str):
        return ""
    return f" (process {pid}, since {started[:19]})"
