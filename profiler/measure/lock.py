"""The lock of a device, so that no two measurements disturb each other."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from costmodel.errors import DeviceError
from decoder.names import has_gpu

OWNER = re.compile(r"process \d+, since [\d :-]{19}")


def lock_directory() -> Path:
    """The folder of this user's locks on this machine, whatever ROOFTREE_HOME is."""
    return Path(tempfile.gettempdir()) / f"rooftree-{os.getuid()}"


@contextlib.contextmanager
def device_lock(device: str, say: Callable[[str], None] | None = None) -> Iterator[None]:
    """Hold the lock of `device` (any label that identifies it) during the body.

    When another process of this user holds the lock, `say` gets a line that names the process and
    its start, and this one waits; without `say`, DeviceError is raised at once. The system releases
    the lock when the process ends, however it ends.
    """
    folder = lock_directory()
    path = folder / (re.sub(r"[^A-Za-z0-9._-]+", "-", device)[:150] + ".lock")
    lock = FileLock(path, timeout=0)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout:
            if say is None:
                raise _held(device, path) from None
            say(f"{_held(device, path).problem}: waiting for its end")
            lock.acquire(timeout=-1)
    except OSError as error:
        raise DeviceError(
            f"cannot lock {device} in {folder}: {error.strerror or error}",
            hint="Set TMPDIR to a directory of your own.",
        ) from error
    try:
        with contextlib.suppress(OSError):  # the lock holds all the same
            path.write_text(f"process {os.getpid()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        yield
    finally:
        lock.release()


def refuse_if_held(device: str | None) -> None:
    """Raise DeviceError where another process measures `cpu` or `cuda:N`; None: the default.

    It needs no torch: the end of a lock's name says the device. What it lets pass `device_lock`
    still refuses, as GPUs that CUDA_VISIBLE_DEVICES has renumbered.
    """
    label = (device or ("cuda" if has_gpu() else "cpu")).replace(":", "-")
    if label.startswith("cuda"):
        if os.environ.get("CUDA_VISIBLE_DEVICES"):
            return
        label = label if "-" in label else "cuda-0"
    for path in lock_directory().glob(f"*-{label}.lock"):
        try:
            with FileLock(path, timeout=0):
                pass
        except Timeout:
            raise _held(path.stem, path) from None
        except OSError:  # device_lock says so
            continue


def _held(device: str, path: Path) -> DeviceError:
    owner = None  # the process that holds the lock, where its file says it
    with contextlib.suppress(OSError, UnicodeDecodeError), path.open() as file:
        owner = OWNER.match(file.read(100))
    return DeviceError(
        f"another measurement of {device} is running{f' ({owner[0]})' if owner else ''}",
        hint="Two at once would disturb each other: wait for it or stop it.",
    )
