"""Bounded reading of files, writing in one step, locks, and the place of the shipped data.

Errors of the file system become errors of one line: for a full disk or a missing permission
with what to do.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import stat
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from math import inf
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from costmodel.errors import InputError, ProfileError, RooftreeError
from costmodel.safe_yaml import parse_yaml

# A profile of a thousand points takes about 100 kB; a far larger file is not a profile.
MAX_YAML_BYTES = 4_000_000

MAX_TABLE_BYTES = 256_000_000  # a million lines take some 30 MB

LOCK_WAIT_S = 5.0  # a profile is written within milliseconds

_PART = (".rooftree-", ".tmp")  # around the random part of a temporary file's name


def tool_version() -> str:
    """The installed version of rooftree, `unknown` in a checkout that is not installed."""
    try:
        return version("rooftree")
    except PackageNotFoundError:
        return "unknown"


def now_utc() -> str:
    """The current time, as profiles and results write it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def shipped_directory() -> Path:
    """The `calibrations` folder that is installed beside this package."""
    return Path(__file__).resolve().parent.parent / "calibrations"


def expanded(name: str | Path, error: type[RooftreeError] = InputError) -> Path:
    """The path with the home folder in place of `~`; raises `error` for a user without one."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise error(f"{name}: there is no such user's home folder", hint="Check the path") from None


def folder_of(name: str | Path) -> Path | None:
    """The folder of this name, `~` expanded; None where there is none, however odd the name is."""
    try:
        path = Path(name).expanduser()
    except RuntimeError:  # nobody's home
        return None
    # Path.is_dir raises where a name is too long.
    return path if os.path.isdir(path) else None


def read_yaml(path: Path, error: type[RooftreeError] = ProfileError) -> Any:
    """Parse one YAML document into plain Python values; nothing in it is executed.

    Raises `error` with one line where it is unreadable, too large, not UTF-8 or not YAML.
    """
    return parse_yaml(read_bytes(path, error), str(path), error)


def read_bytes(
    path: Path, error: type[RooftreeError] = ProfileError, *, most_bytes: int = MAX_YAML_BYTES
) -> bytes:
    """The bytes of a regular file; raises `error` where it is none, unreadable or too large.

    Pipes and devices, which may have no end, are refused before they are opened.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise error(f"{path}: cannot be read (it is not a regular file)", hint="Check the path")
        with (
            _opened(path, os.O_RDONLY | os.O_NONBLOCK) as handle,
            open(handle, "rb", closefd=False) as stream,
        ):
            raw = stream.read(most_bytes + 1)
    except FileNotFoundError:
        raise error(f"{path}: there is no such file", hint="Check the path") from None
    except ValueError:  # a null character
        raise error(f"{path!r}: is not a path", hint="Check the path") from None
    except OSError as failure:
        reason = failure.strerror or str(failure)
        raise error(f"{path}: cannot be read ({reason})", hint="Check its permissions") from None
    if len(raw) > most_bytes:
        raise error(
            f"{path}: larger than {most_bytes // 1_000_000} MB, so it is not a file of ours",
            hint="Check the path",
        )
    return raw


def read_table(path: Path) -> io.StringIO:
    """The text of a CSV file in UTF-8, for `csv.DictReader`.

    Raises InputError where it cannot be read, and UnicodeDecodeError.
    """
    raw = read_bytes(path, InputError, most_bytes=MAX_TABLE_BYTES)
    return io.StringIO(raw.decode("utf-8-sig"), newline="")


def write_atomic(
    path: Path, content: str | bytes, error: type[RooftreeError] = ProfileError
) -> None:
    """Write text (as UTF-8) or bytes in one step: `path` holds the old content or the new.

    Raises `error` on a full disk, a missing permission or any other failure to write.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    try:
        with replacing(path) as part, _opened(part, os.O_WRONLY) as handle:
            view = memoryview(data)
            while view:
                view = view[os.write(handle, view) :]
    except OSError as failure:
        raise write_error(path, failure, error) from None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` for the body to fill; replaces `path` after it.

    The file is synced and renamed, so that `path` holds the old content or the new, never a
    part. Where the body fails, the file is removed and `path` stays unchanged. The file of a
    process that was killed is removed by the next one that writes into the folder. The name is
    new each time, so that two processes may write one `path`. The folder is made where it is
    missing. Raises OSError, also for a pipe or device, which the rename would replace.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(path.parent)
    locked, part = _locked_part(path.parent)
    try:
        yield part
        with _opened(part, os.O_RDONLY) as handle:
            os.fchmod(handle, 0o644)
            os.fsync(handle)
        os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink()  # gone already where the rename succeeded
        os.close(locked)
    _sync_folder(path.parent)


def _locked_part(folder: Path) -> tuple[int, Path]:
    """A new file in the folder, and the open lock that says that its process lives."""
    prefix, suffix = _PART
    while True:
        handle, name = tempfile.mkstemp(prefix=prefix, suffix=suffix, dir=folder)
        with contextlib.suppress(OSError):  # some network file systems lock no files
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle, Path(name)
        os.close(handle)  # another process took it for stale before it was locked


def _remove_stale(folder: Path) -> None:
    """Remove the temporary files of processes that were killed: nobody locks them."""
    prefix, suffix = _PART
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if name.startswith(prefix) and name.endswith(suffix):
                _remove_unlocked(folder / name)


def _remove_unlocked(path: Path) -> None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    with contextlib.suppress(OSError), _opened(path, flags) as handle:
        status = os.fstat(handle)
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its writer lives
            path.unlink()


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    """The descriptor of a file or folder, closed after the body. Raises OSError."""
    handle = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield handle
    finally:
        os.close(handle)


def _sync_folder(folder: Path) -> None:
    """Make the rename durable. Some file systems refuse; the file is complete all the same."""
    with contextlib.suppress(OSError), _opened(folder, os.O_RDONLY) as handle:
        os.fsync(handle)


@contextlib.contextmanager
def folder_lock(folder: Path, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
    """Lock a folder of profiles while the body changes a file in it; make it where missing.

    The folder itself is locked, so no lock file is left behind. Where its file system has no
    such locks, the body runs without one. Raises ProfileError where the folder cannot be made
    or another process holds the lock for more than `wait_s`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as failure:
        raise write_error(folder, failure, ProfileError) from None
    try:
        if not lock(handle, wait_s):
            raise ProfileError(
                f"{folder}: not written, another process is writing there",
                hint="Try again once it has ended",
            )
        yield
    finally:
        os.close(handle)  # which gives the lock back


@contextlib.contextmanager
def file_lock(path: Path, wait_s: float = inf) -> Iterator[int]:
    """Lock a file of one's own during the body, made where missing; yields its descriptor.

    Symbolic links are not followed. The system gives the lock back when the process ends,
    however it ends. Raises BlockingIOError where another process holds it for more than
    `wait_s`, and OSError where the file cannot be opened.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    with _opened(path, flags) as handle:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        if not lock(handle, wait_s):
            raise BlockingIOError(errno.EAGAIN, "another process holds the lock")
        yield handle


def lock(handle: int, wait_s: float) -> bool:
    """Lock an open file or folder; whether that succeeded in time. Closing it unlocks it.

    Where the file system has no such locks, it counts as locked.
    """
    deadline_s = monotonic() + wait_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if monotonic() > deadline_s:
                return False
            sleep(0.01)
        except OSError:  # some network file systems lock no folders
            return True
        else:
            return True


def write_error(path: Path, failure: OSError, error: type[RooftreeError]) -> RooftreeError:
    """The error of a file that could not be written: a full disk, a missing permission, ..."""
    elsewhere = "choose a folder"
    if error is ProfileError:
        elsewhere = "set ROOFTREE_HOME to a folder"
    if failure.errno in (errno.ENOSPC, errno.EDQUOT):
        return error(
            f"{path}: not written, the disk is full",
            hint=f"Free some space, or {elsewhere} on another disk",
        )
    if failure.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return error(
            f"{path}: not written, no permission to write there",
            hint=f"{elsewhere[0].upper()}{elsewhere[1:]} that you may write to",
        )
    return error(
        f"{path}: not written ({failure.strerror or failure})",
        hint=f"{elsewhere[0].upper()}{elsewhere[1:]} that can be written to",
    )


def input_yaml(path: Path) -> Any:
    """`read_yaml` for data files that are no profiles: raises InputError."""
    return read_yaml(path, InputError)
