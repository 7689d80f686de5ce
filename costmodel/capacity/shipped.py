"""The overheads that are shipped: calibrations/engines.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from costmodel.capacity.overheads import FACTORS, OVERHEADS, Overheads
from costmodel.errors import InputError
from costmodel.files import input_yaml, shipped_directory

SHARED = "shared"


@cache
def _shipped() -> dict[str, Overheads]:
    return load_overheads(shipped_directory() / "engines.yaml")


def engine_overheads(engine: str) -> Overheads:
    """The shipped overheads of one engine; the shared ones where it has none of its own."""
    known = _shipped()
    return known.get(engine, known[SHARED])


def load_overheads(path: Path) -> dict[str, Overheads]:
    """Overheads by engine from a file. Raises InputError naming the field that is wrong."""
    table = input_yaml(path)
    if not isinstance(table, Mapping) or SHARED not in table:
        raise InputError(f"{path}: must map engines, and '{SHARED}', to their overheads")
    return {str(engine): _overheads(path, str(engine), row) for engine, row in table.items()}


def _overheads(path: Path, engine: str, row: Any) -> Overheads:
    names = (*FACTORS, *OVERHEADS)
    if not isinstance(row, Mapping) or set(row) != set(names):
        raise InputError(f"{path}: {engine}: must have exactly these fields: {', '.join(names)}")
    for name in names:
        value = row[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InputError(f"{path}: {engine}: {name} must be a number (is {value!r})")
        if not abs(value) < (10.0 if name in FACTORS else 1.0):
            raise InputError(f"{path}: {engine}: {name} is out of range (is {value!r})")
    return Overheads(**{name: float(row[name]) for name in names})
