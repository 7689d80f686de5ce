"""Validated field types, with the physical range of each, and the base of what a profile stores.

A section is frozen and refuses unknown fields, wrong types, NaN, infinity and numbers that no
machine can have: predictions from numbers in these ranges stay finite and above 0. Lists are
kept as tuples; numpy arrays are accepted when a section is made in Python.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, TypeGuard

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Text = Annotated[str, Field(strict=True, min_length=1, max_length=500)]
AnyText = Annotated[str, Field(strict=True, max_length=2000)]
Hash = Annotated[str, Field(strict=True, pattern=r"^[A-Za-z0-9._:-]{1,80}$")]
# Rows, cached tokens, batches, samples, layers: no machine has more of anything that is counted.
MOST = 10**9
Count = Annotated[int, Field(strict=True, ge=1, le=MOST)]
CountOrZero = Annotated[int, Field(strict=True, ge=0, le=MOST)]
Bytes = Annotated[int, Field(strict=True, ge=1, le=2**60)]

# The shortest stage takes about 1e-6 s, and 1e5 s are a day. Differences of any two times in this
# range are exact enough to stay above 0.
LEAST_S, MOST_S = 1e-8, 1e5
Seconds = Annotated[float, Field(strict=True, ge=LEAST_S, le=MOST_S, allow_inf_nan=False)]
SecondsOrZero = Annotated[float, Field(strict=True, ge=0, le=MOST_S, allow_inf_nan=False)]
SignedSeconds = Annotated[float, Field(strict=True, ge=-MOST_S, le=MOST_S, allow_inf_nan=False)]

FlopsPerS = Annotated[float, Field(strict=True, ge=1e6, le=1e21, allow_inf_nan=False)]
BytesPerS = Annotated[float, Field(strict=True, ge=1e6, le=1e18, allow_inf_nan=False)]
Hertz = Annotated[float, Field(strict=True, ge=1e3, le=1e12, allow_inf_nan=False)]
Watts = Annotated[float, Field(strict=True, ge=1e-3, le=1e9, allow_inf_nan=False)]
Celsius = Annotated[float, Field(strict=True, ge=-274, le=1000, allow_inf_nan=False)]

# A time over the roofline's time: up to 1e6 where launches are all of a tiny model's forward.
Factor = Annotated[float, Field(strict=True, ge=0, le=1e15, allow_inf_nan=False)]
# An error or a spread, which is shown and never computed with.
Statistic = Annotated[float, Field(strict=True, ge=0, le=1e18, allow_inf_nan=False)]
ErrorBar = Annotated[float, Field(strict=True, ge=0, le=10, allow_inf_nan=False)]
# A standard deviation of log seconds: of any size for one that may be 0, else not negligible.
LogScale = Annotated[float, Field(strict=True, ge=1e-4, le=1, allow_inf_nan=False)]
LogScaleOrZero = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
# Of one stored weight: packed in one bit, or a float64.
WeightBytes = Annotated[float, Field(strict=True, ge=0.05, le=8, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]


def _as_tuple(value: Any) -> Any:
    """Lists and numpy arrays become tuples (NaN: None)."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
        value = [None if isinstance(x, float) and np.isnan(x) else x for x in value]
    return tuple(value) if isinstance(value, list) else value


_Listed = BeforeValidator(_as_tuple)
# Strict tuples: without it a YAML set would pass, in any order. The stairs calibration inverts
# a matrix of all points: of a few hundred in practice, of 2,000 in a second.
_TUPLE = Field(strict=True, max_length=2_000)
Counts = Annotated[tuple[Count, ...], _TUPLE, _Listed]
CountsOrZero = Annotated[tuple[CountOrZero, ...], _TUPLE, _Listed]
SecondsList = Annotated[tuple[Seconds, ...], _TUPLE, _Listed]
SpreadList = Annotated[tuple[SecondsOrZero | None, ...], _TUPLE, _Listed]
Utc = Annotated[str, Field(strict=True, pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]
Texts = Annotated[tuple[Text, ...], _TUPLE, _Listed]


class Section(BaseModel):
    """Base of everything stored: frozen, no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def is_whole(value: object, least: int = 0, most: int = MOST) -> TypeGuard[int]:
    """Whether a value of a file is a whole number, which true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def check_lengths(section: Section, names: tuple[str, ...]) -> None:
    """Raise ValueError unless the named arrays have one common length above 0."""
    first = len(getattr(section, names[0]))
    if first == 0:
        raise ValueError(f"{names[0]} is empty")
    for name in names[1:]:
        length = len(getattr(section, name))
        if length != first:
            raise ValueError(f"{name} has {length} entries, but {names[0]} has {first}")


def check_ascending(name: str, *columns: tuple[int, ...]) -> None:
    """Raise ValueError unless the columns, compared entry by entry in this order, ascend."""
    entries = list(zip(*columns, strict=True))
    for index, (one, other) in enumerate(pairwise(entries), start=1):
        if one >= other:
            raise ValueError(
                f"entries must ascend by {name}, without repeats (entry {index} does not)"
            )
