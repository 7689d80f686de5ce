"""Benchmark results as JSON files, checked on reading with errors by field path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from costmodel.errors import InputError
from costmodel.io import read_json, write_atomic
from costmodel.profile.text import describe_error
from lab.bench.record import SCHEMA_VERSION, Result

_HINT = "Give a file that `rooftree bench --output` of this version wrote."


def read_result(path: str | Path) -> Result:
    """Read and check a result. Raises InputError naming the file, the field and the problem."""
    data = read_json(Path(path), hint=_HINT)
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise InputError(
            f"{path}: is not a bench result: schema_version must be {SCHEMA_VERSION}"
            f" (is {version!r})",
            hint=_HINT,
        )
    try:
        return TypeAdapter(Result).validate_json(json.dumps(data), strict=True)
    except ValidationError as failure:
        raise InputError(f"{path}: {first_problem(failure)}", hint=_HINT) from None


def write_result(result: Result, path: str | Path, **derived: Any) -> None:
    """Write the result and the `derived` fields in one step; `read_result` ignores the latter.

    Raises InputError where the file cannot be written.
    """
    text = json.dumps(result.as_dict() | derived, allow_nan=False, separators=(",", ":"))
    write_atomic(Path(path), text + "\n", InputError)


def first_problem(failure: ValidationError) -> str:
    """The first error as 'field: problem', and the number of further errors."""
    errors = failure.errors(include_url=False)
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return " ".join(describe_error(errors[0]).split()) + more
