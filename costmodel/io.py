"""Reading of YAML, JSON and tables, each file bounded, and writing in one step.

A file that cannot be used is an error of one line that names the file and what to do.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from math import isfinite
from pathlib import Path
from typing import Any

import yaml

from costmodel.errors import InputError, ProfileError, RooftreeError

# A profile of a thousand points takes about 100 kB; a far larger file is not a profile.
MAX_YAML_BYTES = 4_000_000
MAX_TABLE_BYTES = 256_000_000  # a million lines take some 30 MB
MAX_JSON_BYTES = 256_000_000  # a bench result of many prompts takes some 10 MB

LOCK_WAIT_S = 5.0  # a profile is written within milliseconds

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):  # type: ignore[misc]
    """Refuses a key that stands twice, of which YAML would take the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(set(keys)) < len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            mark = node.start_mark
            raise yaml.constructor.ConstructorError(None, None, f"{twice} stands twice", mark)
        return super().construct_mapping(node, deep)


class NotJson(ValueError):
    """Text that is not JSON; the message says why in a few words."""


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
    """The folder of this name, `~` expanded; None without one, however odd the name is."""
    try:
        path = Path(name).expanduser()
    except RuntimeError:  # nobody's home
        return None
    # Path.is_dir raises where a name is too long.
    return path if os.path.isdir(path) else None


def read_bytes(
    path: Path, error: type[RooftreeError] = ProfileError, *, most_bytes: int = MAX_YAML_BYTES
) -> bytes:
    """The bytes of a regular file; raises `error` where it is none, unreadable or too large."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe or device may have no end
            raise error(f"{path}: cannot be read (it is not a regular file)", hint="Check the path")
        with open(path, "rb") as stream:
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


def text_of(raw: bytes, errors: str = "strict") -> str:
    """The text of a file in UTF-8, or in UTF-16 with a byte order mark, as PowerShell writes it."""
    wide = raw[:2] in (b"\xff\xfe", b"\xfe\xff")
    return raw.decode("utf-16" if wide else "utf-8-sig", errors)


def read_table(
    path: Path, needed: Sequence[str] = (), *, hint: str = ""
) -> tuple[list[str], Iterator[tuple[str, dict[str, str]]]]:
    """The columns of a CSV file, and of each line the place and the cells by column.

    Names are in lower case. Commas, semicolons or tabs part the cells. Raises InputError for a
    `needed` column that is missing, one that stands twice, and a line with more cells than columns.
    """
    try:
        text = io.StringIO(text_of(read_bytes(path, InputError, most_bytes=MAX_TABLE_BYTES)), "")
        first = text.readline()
        text.seek(0)
        table = csv.reader(text, delimiter=max(",;\t", key=first.count))
        names = [name.strip().lower() for name in next(table, [])]
    except (UnicodeDecodeError, csv.Error) as failure:
        raise InputError(f"{path}: not a CSV file in UTF-8 ({failure})", hint=hint) from None
    if missing := [name for name in needed if name not in names]:
        raise InputError(f"{path} has no column {' and no column '.join(missing)}", hint=hint)
    if twice := next((name for name in names if name and names.count(name) > 1), None):
        raise InputError(f"{path}: the column {twice} stands twice", hint="Leave one out")
    return names, _table_lines(path, table, names)


def _table_lines(path: Path, table: Any, names: list[str]) -> Iterator[tuple[str, dict[str, str]]]:
    try:
        for cells in table:
            place, cells = f"{path}, line {table.line_num}", [cell.strip() for cell in cells]
            if any(cells[len(names) :]):
                raise InputError(
                    f"{place} has {len(cells)} cells, and the table {len(names)} columns",
                    hint="Write numbers without commas, or quote them",
                )
            if any(cells):
                yield place, dict(zip_longest(names, cells[: len(names)], fillvalue=""))
    except csv.Error as failure:
        raise InputError(f"{path}: not a CSV file ({failure})") from None


def number_of(cell: str, place: str, column: str) -> float:
    """The finite number in a cell of a table. Raises InputError with its place and column."""
    with contextlib.suppress(ValueError):
        if isfinite(number := float(cell)):
            return number
    raise InputError(f"{place}: {column} must be a finite number (is {cell!r})")


def read_yaml(path: Path) -> Any:
    """The plain values of a YAML file. Raises InputError where it cannot be read or parsed."""
    return parse_yaml(read_bytes(path, InputError), str(path), InputError)


def parse_yaml(raw: bytes, label: str, error: type[RooftreeError] = ProfileError) -> Any:
    """The plain values of a YAML document; nothing in it is executed.

    Raises `error`, naming `label` as the origin, for bytes that are no YAML in UTF-8 or hold
    aliases.
    """
    try:
        text = text_of(raw)
        # Looking for an alias's character is a hundred times as fast as parsing.
        if "*" in text and any(
            isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=_Loader)
        ):
            raise yaml.YAMLError("aliases are not read")
        return yaml.load(text, Loader=_Loader)
    except UnicodeDecodeError as failure:
        problem = f"not UTF-8 text (byte {failure.start})"
    except RecursionError:
        problem = "not readable as YAML: nested too deeply"
    # The constructors' errors for values that do not fit their tag are of several classes.
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError) as failure:
        mark = getattr(failure, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark is not None else ""
        reason = " ".join(str(getattr(failure, "problem", None) or failure).split())[:200]
        reason = "".join(letter if letter.isprintable() else "?" for letter in reason)
        problem = f"not readable as YAML{where}: {reason}"
    hint = "Restore the file"
    if error is ProfileError:
        hint += ", or measure again with `rooftree calibrate`"
    raise error(f"{label}: {problem}", hint=hint)


def read_json(path: Path, *, hint: str = "", finite: bool = True) -> Any:
    """The JSON value in a file; `finite` refuses NaN and infinity. Raises InputError."""
    raw = read_bytes(path, InputError, most_bytes=MAX_JSON_BYTES)
    try:
        return parse_json(raw, finite=finite)
    except NotJson as failure:
        raise InputError(
            f"{path} cannot be read as JSON: {failure}", hint=hint or "Restore the file."
        ) from None


def json_lines(path: Path, raw: bytes, *, hint: str = "") -> Iterator[tuple[int, Any]]:
    """The number, from 1, and the JSON value of each line that is not blank.

    Raises InputError naming the file and the line that is not JSON.
    """
    # A line that is not UTF-8 is found below, by its number.
    raw = text_of(raw, "surrogateescape").encode("utf-8", "surrogateescape")
    for number, line in enumerate(raw.split(b"\n"), 1):
        if line.strip():
            try:
                yield number, parse_json(line)
            except NotJson as failure:
                raise InputError(
                    f"{path}, line {number} cannot be read as JSON: {failure}", hint=hint
                ) from None


def parse_json(raw: bytes | str, *, finite: bool = True) -> Any:
    """The value of a JSON text, in plain Python types. Raises NotJson."""
    number = _finite if finite else float
    try:
        text = text_of(raw) if isinstance(raw, bytes) else raw
        return json.loads(
            text,
            parse_constant=number,
            parse_float=number,
            parse_int=_whole,
            object_pairs_hook=_object,
        )
    except NotJson:
        raise
    except UnicodeDecodeError as failure:
        raise NotJson(f"it is not UTF-8 text (byte {failure.start})") from None
    except RecursionError:
        raise NotJson("it is nested too deeply") from None
    except json.JSONDecodeError as failure:
        raise NotJson(f"{failure.msg} in line {failure.lineno}") from None
    except ValueError:  # Python's limit of digits
        raise NotJson("a number has too many digits") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        for key, value in pairs:
            if value != fields[key]:
                raise NotJson(f"{key} stands twice, with different values")
    return fields


def _whole(text: str) -> int:
    value = int(text)
    if value.bit_length() > 63:
        raise NotJson("a whole number has more than 64 bits")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise NotJson("a number is not finite")
    return value


def write_atomic(
    path: Path, content: str | bytes, error: type[RooftreeError] = ProfileError
) -> None:
    """Write text (as UTF-8) or bytes in one step: `path` holds the old content or the new.

    Raises `error` on any failure to write.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    try:
        with replacing(path) as part, open(part, "wb") as stream:
            view = memoryview(data)
            while view:
                view = view[os.write(stream.fileno(), view) :]
    except OSError as failure:
        raise write_error(path, failure, error) from None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` for the body to fill; synced and renamed to `path` after it.

    Where the body fails, `path` stays unchanged. A missing folder is made. Raises OSError, also for
    a pipe or device, which the rename would replace.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".rooftree-", suffix=".tmp", dir=path.parent)
    os.close(handle)
    part = Path(name)
    try:
        yield part
        with open(part, "rb") as stream:
            os.fchmod(stream.fileno(), 0o644)
            os.fsync(stream.fileno())
        os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink()  # gone already where the rename succeeded


@contextlib.contextmanager
def folder_lock(folder: Path, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
    """Lock a folder of profiles, made where missing, while the body changes a file in it.

    Raises ProfileError where it cannot be written to, or is locked for more than `wait_s`.
    """
    from filelock import FileLock, Timeout  # 25 ms, which no lookup needs

    lock = FileLock(folder / ".rooftree.lock", timeout=wait_s)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise ProfileError(
            f"{folder}: not written, another process is writing there",
            hint="Try again once it has ended",
        ) from None
    except OSError as failure:
        raise write_error(folder, failure, ProfileError) from None
    try:
        yield
    finally:
        lock.release()


def write_error(path: Path, failure: OSError, error: type[RooftreeError]) -> RooftreeError:
    """The error of a file that could not be written: a full disk, a missing permission, ..."""
    elsewhere = "choose a folder"
    if error is ProfileError:
        elsewhere = "set ROOFTREE_HOME to a folder"
    if failure.errno in (errno.ENOSPC, errno.EDQUOT):
        return error(
            f"{path}: not written, the disk is full",
            hint=f"Free some space, or {elsewhere} on another disk",
        ).of_output()
    reason, wanted = f" ({failure.strerror or failure})", "can be written to"
    if failure.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        reason, wanted = ", no permission to write there", "you may write to"
    hint = f"{elsewhere[0].upper()}{elsewhere[1:]} that {wanted}"
    return error(f"{path}: not written{reason}", hint=hint).of_output()


def check_output(path: Path, *, folder: bool = False) -> None:
    """Raise InputError where a file could not be written to `path`, or with `folder` into it."""
    parent = path.absolute() if folder else path.absolute().parent
    if not folder and path.is_dir():
        raise InputError(f"{path} is a folder", hint="Give --output a file name.").of_output()
    there = next(one for one in (parent, *parent.parents) if os.path.lexists(one))
    try:
        # A new file, which nobody can have planted, and which is gone however this ends.
        with tempfile.TemporaryFile(dir=there, buffering=0) as probe:
            probe.write(b"\0" * 4096)
    except OSError as failure:
        raise InputError(
            f"cannot write to {parent}: {failure.strerror or failure}",
            hint="Choose another place for --output.",
        ).of_output() from None
