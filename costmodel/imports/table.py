"""A table of forward times of another tool, the checks that its readers share, and CSV."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from costmodel.calibration.points import Points
from costmodel.errors import InputError, shown
from costmodel.fields import LEAST_S, MOST_S, is_whole
from costmodel.io import number_of, read_table
from costmodel.profile.schema import Dtype, RuntimeKind
from costmodel.statistics import mad_s

LEAST_POINTS = 4
MOST_SHAPES = 200_000
_TIMES = ("seconds", "milliseconds", "microseconds", "forward_s", "forward_ms", "forward_us")
_UNITS = {"s": 1.0, "sec": 1.0, "ms": 1e-3, "msec": 1e-3, "us": 1e-6, "usec": 1e-6, "ns": 1e-9}
_UNITS |= {"seconds": 1.0, "milliseconds": 1e-3, "microseconds": 1e-6, "nanoseconds": 1e-9}
# At the end of a name, as in `forward_ms`, `latency (ms)`, `time [us]`, `seconds`.
_UNIT = re.compile(rf"(?:^|[_ (\[])({'|'.join(_UNITS)})[)\]]?$")
_CSV_HINT = "Give a CSV with the columns new_tokens, context_tokens and seconds or microseconds"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """Weights as the file says: `dtype`, or the quantisation and the mean bytes of a weight."""

    dtype: Dtype = "bfloat16"
    quantization: str | None = None
    weight_bytes: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImportedTable:
    """Forward times of one tool and setting.

    tool        the tool's name; `version` is None where the file does not say it
    runtime     `external`: steps of an engine; `kernels`: host time is left out, or it is unknown
    lacks       what the times do not hold, for people
    left_out    records that are no forward of equal sequences, by reason
    weights     None where the file does not say
    processor   the device as the file names it; `threads` of a CPU
    parameters  of the model; 0 where the file does not say
    gpu_layers  layers that ran on the GPU, the output's counted as one; None: all
    model       the model as the file names it
    """

    points: Points
    tool: str
    version: str | None
    runtime: RuntimeKind
    lacks: tuple[str, ...]
    left_out: Mapping[str, int] = dataclasses.field(default_factory=dict)
    weights: WeightFormat | None = None
    processor: str | None = None
    threads: int | None = None
    parameters: int = 0
    gpu_layers: int | None = None
    model: str | None = None


class ShapeTimes:
    """Times by shape (rows, context, batch) while a file is read; repeats of a shape are averaged.

    `leave_out` counts records that give no point, by reason.
    """

    def __init__(self, path: Path, *, hint: str) -> None:
        self.path, self.hint = path, hint
        self.left_out: Counter[str] = Counter()
        self._times: dict[tuple[int, int, int], list[tuple[float, float, int]]] = {}

    def add(
        self, shape: tuple[int, int, int], seconds: float, *, samples_s: Sequence[float] = ()
    ) -> None:
        """Add one median; `samples_s` are the times behind it. Raises InputError."""
        if not LEAST_S <= seconds <= MOST_S:
            raise InputError(
                f"{self.path}: {seconds:g} s for {shape[0]} rows is no time of a forward",
                hint="Check the unit of the times",
            )
        if len(self._times) > MOST_SHAPES:
            raise InputError(f"{self.path} has more than {MOST_SHAPES} shapes", hint=self.hint)
        spread_s = mad_s(samples_s)
        entry = (seconds, math.nan if spread_s is None else spread_s, max(len(samples_s), 1))
        self._times.setdefault(shape, []).append(entry)

    def leave_out(self, reason: str) -> None:
        self.left_out[reason] += 1

    def points(self) -> Points:
        """All points. Raises InputError where they are too few for a fit, or no measurement."""
        left = "; ".join(f"{count} left out: {why}" for why, count in self.left_out.items())
        reasons = left or self.hint
        if not self._times:
            raise InputError(f"{self.path} has no times that can be used", hint=reasons)
        shapes, entries = list(self._times), list(self._times.values())
        rows, context, batch = zip(*shapes, strict=True)
        points = Points(
            rows=rows,
            context=context,
            batch=batch,
            seconds=[sum(time for time, _, _ in one) / len(one) for one in entries],
            mad_s=[max(spread for _, spread, _ in one) for one in entries],
            n=[sum(count for _, _, count in one) for one in entries],
        )
        if len(points) < LEAST_POINTS:
            raise InputError(
                f"{self.path} has {len(points)} shapes with a time, and a fit needs"
                f" {LEAST_POINTS} or more",
                hint=reasons,
            )
        if len(set(points.seconds.tolist())) == 1:
            raise InputError(
                f"all times in {self.path} are the same, which no measurement gives",
                hint="Check where the times come from",
            )
        if len(set(points.rows.tolist())) < 2:
            raise InputError(
                f"{self.path} has one row count only ({points.rows[0]:g} new tokens a sequence)",
                hint="Measure several row counts",
            )
        return points


class TableRecord:
    """One mapping of a file; errors name the file, the record and the field."""

    def __init__(self, value: Any, at: str, *, hint: str) -> None:
        self.at, self.hint = at, hint
        if not isinstance(value, Mapping):
            raise self._error(f"is not a mapping of fields (is {shown(value)})")
        self.fields = value

    def _error(self, problem: str) -> InputError:
        return InputError(f"{self.at} {problem}", hint=self.hint)

    def get(self, name: str) -> Any:
        if name not in self.fields:
            raise self._error(f"has no field {name}")
        return self.fields[name]

    def whole(self, name: str, least: int = 0) -> int:
        value = self.get(name)
        if not is_whole(value, least):
            raise self._error(f"{name} must be a whole number from {least} (is {shown(value)})")
        return value

    def positive(self, name: str) -> float:
        """A finite number above 0."""
        return self._positive(name, self.get(name))

    def numbers(self, name: str) -> list[float]:
        """A list of finite numbers above 0."""
        return [self._positive(name, value) for value in self._list(name)]

    def terms(self, name: str) -> list[float]:
        """A list of numbers, which may be 0 or below."""
        values = self._list(name)
        if not all(type(value) in (int, float) for value in values):
            raise self._error(f"{name} must be a list of numbers")
        return [float(value) for value in values]

    def wholes(self, name: str, least: int = 1) -> list[int]:
        """A list of ascending whole numbers of `least` or more."""
        values = self._list(name)
        for value in values:
            if not is_whole(value, least):
                raise self._error(
                    f"{name} must hold whole numbers from {least} (has {shown(value)})"
                )
        if values != sorted(set(values)) or not values:
            raise self._error(f"{name} must ascend, with one number or more")
        return values

    def text(self, name: str) -> str:
        """A text that is not empty."""
        value = self.get(name)
        if not isinstance(value, str) or not value.strip():
            raise self._error(f"{name} must be a text (is {shown(value)})")
        return value.strip()

    def _list(self, name: str) -> list[Any]:
        value = self.get(name)
        if not isinstance(value, list):
            raise self._error(f"{name} must be a list (is {shown(value)})")
        return value

    def _positive(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._error(f"{name} must be a number (is {shown(value)})")
        if not 0 < value < math.inf:
            raise self._error(f"{name} must be a finite number above 0 (is {shown(value)})")
        return float(value)


def read_csv(path: Path, context: int | None = None) -> ImportedTable:
    """The points of a CSV with `new_tokens`, `context_tokens`, a time, and optionally `batch`.

    Rows with an empty time are left out; repeats of a shape are averaged. The time is the column
    `seconds`, `milliseconds`, `microseconds` or `forward_(s|ms|us)`, else the only column whose
    name ends in a unit, such as `latency (ms)`. Raises InputError with the line and the problem.
    """
    names, lines = read_table(path, ("new_tokens", "context_tokens"), hint=_CSV_HINT)
    time, unit = _time_column(names, path)
    times = ShapeTimes(path, hint=_CSV_HINT)
    empty = True
    for at, row in lines:
        if not row[time]:
            continue
        empty, seconds = False, unit * number_of(row[time], at, time)
        if not seconds > 0:
            raise InputError(f"{at}: {time} must be a number above 0 (is {row[time]})")
        shape = (
            _whole(row, "new_tokens", 1, at),
            _whole(row, "context_tokens", 0, at),
            _whole(row, "batch", 1, at) if "batch" in names else 1,
        )
        times.add(shape, seconds)
    if empty:
        raise InputError(f"{path} has no rows with a time in the column {time}", hint=_CSV_HINT)
    return ImportedTable(
        points=times.points(),
        tool="CSV table",
        version=None,
        runtime="kernels",
        lacks=("host time, as far as the table leaves it out",),
    )


def _time_column(names: list[str], path: Path) -> tuple[str, float]:
    units = {name: _UNITS[match[1]] for name in names if (match := _UNIT.search(name))}
    for name in _TIMES:
        if name in units:
            return name, units[name]
    if len(units) == 1:
        return next(iter(units.items()))
    problem = "several columns of times: " if units else "no column of times"
    raise InputError(f"{path} has {problem}{', '.join(units)}", hint=_CSV_HINT)


def _whole(row: dict[str, str], name: str, least: int, at: str) -> int:
    value = number_of(row[name], at, name)
    if value != int(value) or not least <= value < 1e9:
        raise InputError(f"{at}: {name} must be a whole number of {least} or more (is {row[name]})")
    return int(value)
