"""An append-only journal of samples, from which an interrupted run resumes.

The file has one JSON object a line. The first line is a header that describes the run; only a
run with the same header resumes it. A last line that a kill cut short is dropped at the next
opening. A damaged line between others is left out and counted.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from costmodel.errors import InputError, MeasurementError
from costmodel.io import NotJson, parse_json, read_bytes

VERSION = 1
MOST_BYTES = 256_000_000  # a long sweep takes some 5 MB


class Journal(contextlib.AbstractContextManager["Journal"]):
    """An open journal: `records` of the run that it resumes, `append` for new ones.

    damaged  number of lines of that run that could not be read
    dropped  why the records of an earlier run were dropped; empty where there were none

    Closing keeps the file for the next run.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """header: the run in JSON values. Raises MeasurementError where nothing can be written."""
        self.path = path
        self.records: list[dict[str, Any]] = []
        self.damaged, self.dropped, self._size_bytes = 0, "", 0
        header = json.loads(json.dumps(header))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered, so that closing does not write a failed line again.
            self._file = io.FileIO(path, "a")
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            self._resume(header)
        except InputError as error:
            self.dropped = error.problem
        self._file.truncate(self._size_bytes)
        if self._size_bytes == 0:
            self.append({"journal": VERSION, "header": header})

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record, or nothing of it. Raises MeasurementError if it fails."""
        line = json.dumps(record, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._size_bytes)
            raise self._unwritable(error) from error
        self._size_bytes += len(line)

    def close(self) -> None:
        self._file.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _resume(self, header: Mapping[str, Any]) -> None:
        """Fill `records` from the whole lines of a file of this run. Raises InputError."""
        content = read_bytes(self.path, InputError, most_bytes=MOST_BYTES)
        whole_bytes = content.rfind(b"\n") + 1
        if whole_bytes == 0:
            return
        first, *rest = map(_parse, content[:whole_bytes].split(b"\n")[:-1])
        first = first or {}
        earlier = first.get("header")
        if first.get("journal") != VERSION or not isinstance(earlier, dict):
            raise InputError(f"{self.path} is not a journal of this version")
        differing = [
            f"{key} was {earlier.get(key)!r}, is {header.get(key)!r}"
            for key in sorted(earlier.keys() | header.keys())
            if earlier.get(key) != header.get(key)
        ]
        if differing:
            raise InputError(
                f"the unfinished run in {self.path} measured something else: "
                + "; ".join(differing)
            )
        self.records = [record for record in rest if record is not None]
        self.damaged = len(rest) - len(self.records)
        self._size_bytes = whole_bytes

    def _unwritable(self, error: OSError) -> MeasurementError:
        return MeasurementError(
            f"cannot write the journal {self.path}: {error.strerror or error}",
            hint="Free some space or set ROOFTREE_HOME to a directory you can write to.",
        )


def _parse(line: bytes) -> dict[str, Any] | None:
    """The object in a line; None where it is damaged."""
    try:
        value = parse_json(line)
    except NotJson:
        return None
    return value if isinstance(value, dict) else None
