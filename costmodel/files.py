"""Reading YAML safely, writing a file in one step, locks, and where the shipped data lies.

Errors of the file system become `ProfileError`, so that a full disk or a
missing permission is one line that says what to do.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import yaml

from costmodel.errors import InputError, ProfileError, RooftreeError

# A profile of a thousand points takes about 100 kB; anything far above it is not one.
MAX_YAML_BYTES = 4_000_000

# libyaml recurses without a limit and crashes the process somewhere above 20,000 levels.
MAX_YAML_LEVELS = 5_000
_OPENERS = ("[", "{", "- ", "? ", ": ")

LOCK_WAIT_S = 5.0  # a profile is written within milliseconds

# PyYAML's own errors, and what its constructors raise on values that do not fit their tag.
_PARSE_FAILURES = (
    yaml.YAMLError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RecursionError,
)

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _StrictLoader(_Loader):  # type: ignore[misc]
    """The safe loader, but a key given twice is an error instead of the last one winning."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.value in seen and key_node.tag == "tag:yaml.org,2002:str":
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key '{key_node.value}' appears twice", key_node.start_mark
                )
            if isinstance(key_node.value, str):
                seen.add(key_node.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return mapping


def shipped_directory() -> Path:
    """The `calibrations` folder that is installed beside this package."""
    return Path(__file__).resolve().parent.parent / "calibrations"


def read_yaml(path: Path, error: type[RooftreeError] = ProfileError) -> Any:
    """Parse one YAML document into plain Python values; nothing in it is ever executed.

    Raises `error` with one line: unreadable, too large, not UTF-8, or not YAML.
    """
    return parse_yaml(read_bytes(path, error), str(path), error)


def read_bytes(path: Path, error: type[RooftreeError] = ProfileError) -> bytes:
    """The file's bytes; raises `error` where it cannot be read or is no YAML file by size."""
    try:
        with open(path, "rb") as stream:
            raw = stream.read(MAX_YAML_BYTES + 1)
    except FileNotFoundError:
        raise error(f"{path}: there is no such file", hint="Check the path") from None
    except OSError as failure:
        reason = failure.strerror or str(failure)
        raise error(f"{path}: cannot be read ({reason})", hint="Check its permissions") from None
    if len(raw) > MAX_YAML_BYTES:
        raise error(
            f"{path}: larger than {MAX_YAML_BYTES // 1_000_000} MB, so it is not a file of ours",
            hint="Check the path",
        )
    return raw


def parse_yaml(raw: bytes, label: str, error: type[RooftreeError] = ProfileError) -> Any:
    """Parse YAML bytes; `label` names their origin in errors. Raises `error`."""
    hint = "Restore the file"
    if error is ProfileError:
        hint += ", or measure again with `rooftree calibrate`"
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as failure:
        raise error(f"{label}: not UTF-8 text (byte {failure.start})", hint=hint) from None
    if sum(text.count(mark) for mark in _OPENERS) > MAX_YAML_LEVELS:
        raise error(f"{label}: not readable as YAML: too many or too deep entries", hint=hint)
    try:
        # _StrictLoader derives from the safe loader: plain values only, tags refused.
        return yaml.load(text, Loader=_StrictLoader)
    except _PARSE_FAILURES as failure:
        raise error(f"{label}: {_yaml_problem(failure)}", hint=hint) from None


def _yaml_problem(failure: Exception) -> str:
    if isinstance(failure, RecursionError):
        return "not readable as YAML: nested too deeply"
    mark = getattr(failure, "problem_mark", None)
    where = f" at line {mark.line + 1}" if mark is not None else ""
    problem = str(getattr(failure, "problem", None) or failure)
    if not isinstance(failure, (yaml.YAMLError, ValueError, TypeError)):
        problem = "a value does not fit its tag"
    return f"not readable as YAML{where}: {' '.join(problem.split())[:200]}"


def write_atomic(path: Path, text: str) -> None:
    """Write `text` as UTF-8 so that `path` holds the old content or the new, never a part.

    Raises ProfileError on a full disk, a missing permission or any other failure to write.
    """
    try:
        with replacing(path) as part, _opened(part, os.O_WRONLY) as handle:
            view = memoryview(text.encode("utf-8"))
            while view:
                view = view[os.write(handle, view) :]
    except OSError as failure:
        raise _write_error(path, failure) from None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path`, made with its folder, that the body fills.

    Behind the body it is synced and renamed to `path`, so that this holds the old content or
    the new, never a part, whatever ends the process. Where the body fails, it is removed and
    `path` stays as it was; a kill leaves it behind. Its name is new each time, so that two
    processes may write one file. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    part = Path(name)
    try:
        os.close(handle)
        yield part
        with _opened(part, os.O_RDONLY) as handle:
            os.fchmod(handle, 0o644)
            os.fsync(handle)
        part.replace(path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink()  # gone already where the rename succeeded
    _sync_folder(path.parent)


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    """The file's or folder's descriptor, closed behind the body. Raises OSError."""
    handle = os.open(path, flags)
    try:
        yield handle
    finally:
        os.close(handle)


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable; some file systems refuse, and the file is whole anyway."""
    with contextlib.suppress(OSError), _opened(folder, os.O_RDONLY) as handle:
        os.fsync(handle)


@contextlib.contextmanager
def folder_lock(folder: Path, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
    """Hold the lock of a folder of profiles, which is made, while the body changes a file in it.

    The folder itself is locked, so that no file is left behind; where its file system has no
    such locks, the body runs without. Raises ProfileError where the folder cannot be made or
    another process does not give the lock back within `wait_s`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as failure:
        raise _write_error(folder, failure) from None
    try:
        if not _lock(handle, wait_s):
            raise ProfileError(
                f"{folder}: not written, another process is writing there",
                hint="Try again once it has ended",
            )
        yield
    finally:
        os.close(handle)  # which gives the lock back


def _lock(handle: int, wait_s: float) -> bool:
    """Whether the lock was had in time."""
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


def _write_error(path: Path, failure: OSError) -> ProfileError:
    if failure.errno in (errno.ENOSPC, errno.EDQUOT):
        return ProfileError(
            f"{path}: not written, the disk is full",
            hint="Free some space, or set ROOFTREE_HOME to a folder on another disk",
        )
    if failure.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return ProfileError(
            f"{path}: not written, no permission to write there",
            hint="Set ROOFTREE_HOME to a folder that you may write to",
        )
    return ProfileError(
        f"{path}: not written ({failure.strerror or failure})",
        hint="Set ROOFTREE_HOME to another folder",
    )


def input_yaml(path: Path) -> Any:
    """`read_yaml` for data files that are no profiles: raises InputError."""
    return read_yaml(path, InputError)
