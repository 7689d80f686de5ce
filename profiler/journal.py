"""An append-only record of what was measured, so that an interrupted run loses nothing.

One JSON object a line. The first line is a header that says what is being measured; a run
resumes only a journal with the same header. A line that a kill cut short is dropped on the
next opening; a bad line anywhere else is an error.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from costmodel.errors import InputError, MeasurementError

VERSION = 1
FRESH_HINT = "Run again with --fresh to start over."


class Journal:
    """An open journal: `records` of earlier runs, `append` for new ones.

    Usable as a context manager. Closing keeps the file, so that the next run resumes;
    `delete` removes it once its contents are safe elsewhere.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], *, fresh: bool = False) -> None:
        """Open `path` for the run described by `header` (JSON values), resuming if it matches.

        `fresh` drops whatever is there. Raises `InputError` when the file is another run's or
        damaged, `MeasurementError` when it cannot be written.
        """
        self.path = path
        self.records: list[dict[str, Any]] = []
        header = json.loads(json.dumps(header))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if fresh:
                path.unlink(missing_ok=True)
            self._size_bytes = self._read(header)
            # Unbuffered, so that a line that could not be written is not tried again on closing.
            self._file = path.open("ab", buffering=0)
            self._file.truncate(self._size_bytes)
        except OSError as error:
            raise self._unwritable(error) from error
        if self._size_bytes == 0:
            self.append({"journal": VERSION, "header": header})

    @property
    def resumed(self) -> bool:
        """Whether earlier records were found."""
        return bool(self.records)

    def append(self, record: Mapping[str, Any], *, durable: bool = True) -> None:
        """Write one record: it survives the death of this process, and of the machine if `durable`.

        Raises `MeasurementError` when the line cannot be written; the file is left without it.
        """
        line = json.dumps(record, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if durable:
                os.fsync(self._file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._size_bytes)
            raise self._unwritable(error) from error
        self._size_bytes += len(line)

    def close(self) -> None:
        self._file.close()

    def delete(self) -> None:
        """Close and remove the file."""
        self.close()
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self, header: Mapping[str, Any]) -> int:
        """Fill `records` and return how many bytes of the file are whole lines of this run."""
        if not self.path.exists():
            return 0
        content = self.path.read_bytes()
        whole_bytes = content.rfind(b"\n") + 1
        lines = content[:whole_bytes].splitlines()
        objects = [self._parse(line, number) for number, line in enumerate(lines, start=1)]
        if not objects:
            return 0
        self._check_header(objects[0], header)
        self.records = objects[1:]
        return whole_bytes

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise InputError(f"{self.path} is damaged in line {number}", hint=FRESH_HINT)
        return value

    def _check_header(self, first: Mapping[str, Any], header: Mapping[str, Any]) -> None:
        if first.get("journal") != VERSION or not isinstance(first.get("header"), dict):
            raise InputError(f"{self.path} is not a journal of this version", hint=FRESH_HINT)
        found = first["header"]
        differing = [
            f"{key} was {found.get(key)!r}, is {header.get(key)!r}"
            for key in sorted(found.keys() | header.keys())
            if found.get(key) != header.get(key)
        ]
        if differing:
            raise InputError(
                f"the unfinished run in {self.path} measured something else: "
                + "; ".join(differing),
                hint=FRESH_HINT,
            )

    def _unwritable(self, error: OSError) -> MeasurementError:
        return MeasurementError(
            f"cannot write the journal {self.path}: {error.strerror or error}",
            hint="Free some space or set ROOFTREE_HOME to a directory you can write to.",
        )
