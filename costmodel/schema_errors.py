"""Validation errors of a profile as one line: the field's path and what is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def field_path(location: tuple[int | str, ...]) -> str:
    """A pydantic error location as a person writes it: stages.plain.median_s[3]."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.lstrip(".") or "the file"


def describe_error(error: Mapping[str, Any]) -> str:
    """One pydantic error as 'field: what is wrong', in one line."""
    where = field_path(error["loc"])
    kind, value = str(error["type"]), error.get("input")
    if kind == "missing":
        return f"{where}: is missing"
    if kind == "extra_forbidden":
        return f"{where}: is not a known field"
    if kind == "value_error":
        return f"{where}: {error['ctx']['error']}"
    if kind == "tuple_type":
        return f"{where}: must be a list (is {_shown(value)})"
    if kind in ("model_type", "model_attributes_type", "is_instance_of", "dict_type"):
        return f"{where}: must be a mapping (is {_shown(value)})"
    message = re.sub(r"^\w+ should", "must", str(error["msg"]))
    return f"{where}: {message} (is {_shown(value)})"


def _shown(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, (list, tuple, set)):
        return f"a list of {len(value)}"
    if isinstance(value, Mapping):
        return "a mapping"
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
