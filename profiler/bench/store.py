"""Results of benchmarks as JSON files; one that does not fit is refused by the field's path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from costmodel.errors import InputError, ProfileError
from costmodel.files import write_atomic
from costmodel.schema_errors import describe_error
from profiler.bench.record import SCHEMA_VERSION, Environment, Response, Result

_HINT = "Give a file that `rooftree bench --json` of this version wrote."

_RESULT = TypeAdapter(Result)
_RESPONSE = TypeAdapter(Response)
_ENVIRONMENT = TypeAdapter(Environment)
T = TypeVar("T")


def read_result(path: str | Path) -> Result:
    """Read and check a result. Raises InputError: the file, the field's path, what is wrong."""
    try:
        raw = Path(path).read_bytes()
    except OSError as failure:
        reason = failure.strerror or str(failure)
        raise InputError(f"{path}: cannot be read ({reason})", hint="Check the path.") from None
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError):
        raise InputError(f"{path}: is not JSON", hint=_HINT) from None
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise InputError(
            f"{path}: is not a bench result: schema_version must be {SCHEMA_VERSION}"
            f" (is {version!r})",
            hint=_HINT,
        )
    try:
        return _RESULT.validate_json(raw, strict=True)
    except ValidationError as failure:
        raise InputError(f"{path}: {first_problem(failure)}", hint=_HINT) from None


def write_result(result: Result, path: str | Path, **derived: Any) -> None:
    """Write the result, and what is derived from it, in one step; `read_result` leaves the
    derived fields out. Raises InputError where the file cannot be written."""
    text = json.dumps(result.as_dict() | derived, allow_nan=False, separators=(",", ":"))
    try:
        write_atomic(Path(path), text + "\n")
    except ProfileError as failure:
        raise InputError(failure.problem, hint="Choose another place for --json.") from None


def response_from(data: Any) -> Response:
    """A response of its JSON values, as a journal keeps them. Raises InputError."""
    return _checked(_RESPONSE, data, "a response")


def environment_from(data: Any) -> Environment:
    """The same of an environment."""
    return _checked(_ENVIRONMENT, data, "the environment")


def _checked(adapter: TypeAdapter[T], data: Any, label: str) -> T:
    try:
        return adapter.validate_json(json.dumps(data), strict=True)
    except ValidationError as failure:
        raise InputError(f"{label}: {first_problem(failure)}") from None


def first_problem(failure: ValidationError) -> str:
    """The first error as 'field: what is wrong', and how many more there are."""
    errors = failure.errors(include_url=False)
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return " ".join(describe_error(errors[0]).split()) + more
