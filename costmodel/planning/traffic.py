"""Traffic of a server: its means, a recorded trace, or randomly drawn requests."""

from __future__ import annotations

import csv
import dataclasses
import math
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from costmodel.errors import InputError
from costmodel.io import read_table

COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens")
# Longer than any context window: a larger number is a mistake, and sums of a million fit in int64.
MOST_TOKENS = 100_000_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Mean tokens of a request."""

    prompt_tokens: float
    output_tokens: float

    @property
    def total_tokens(self) -> float:
        """Prompt and answer together."""
        return self.prompt_tokens + self.output_tokens


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """Requests in the order of arrival, recorded or drawn.

    Arrival times in seconds, not falling; whole token counts of at least 1; each [requests].
    """

    arrival_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]

    def __post_init__(self) -> None:
        shapes = {np.shape(getattr(self, name)) for name in COLUMNS}
        if len(shapes) != 1 or len(next(iter(shapes))) != 1 or next(iter(shapes)) == (0,):
            raise InputError("requests need equally long lists, of at least one request")
        times = self.arrival_s
        if not np.all(np.isfinite(times)) or times[0] < 0 or np.any(np.diff(times) < 0):
            raise InputError("arrival times must be 0 or later and must not fall")
        for name in ("prompt_tokens", "output_tokens"):
            tokens = getattr(self, name)
            if tokens.dtype.kind != "i" or tokens.min() < 1 or tokens.max() > MOST_TOKENS:
                raise InputError(f"{name} must be whole numbers from 1 to {MOST_TOKENS}")

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def rate_per_s(self) -> float:
        """Mean arrivals a second between the first and the last arrival."""
        span_s = float(self.arrival_s[-1] - self.arrival_s[0])
        return (len(self) - 1) / span_s if span_s > 0 else math.inf

    @property
    def means(self) -> Traffic:
        """Mean lengths."""
        return Traffic(
            prompt_tokens=float(self.prompt_tokens.mean()),
            output_tokens=float(self.output_tokens.mean()),
        )


class Lengths(Protocol):
    """A distribution of prompt or answer lengths."""

    def draw(self, count: int, generator: np.random.Generator) -> NDArray[np.int64]:
        """`count` lengths of at least one token."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FixedLength:
    """One length for all requests."""

    tokens: int

    def __post_init__(self) -> None:
        if isinstance(self.tokens, bool) or not isinstance(self.tokens, (int, np.integer)):
            raise InputError(f"tokens must be a whole number (is {self.tokens!r})")
        if not 1 <= self.tokens <= MOST_TOKENS:
            raise InputError(f"tokens must be from 1 to {MOST_TOKENS} (is {self.tokens!r})")

    def draw(self, count: int, generator: np.random.Generator) -> NDArray[np.int64]:
        return np.full(count, self.tokens, dtype=np.int64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LognormalLength:
    """Log-normal lengths, rounded to whole tokens and cut to 1 .. `most_tokens`.

    `mean_tokens` is the mean before the cut; `variation` is the standard deviation over the mean.
    """

    mean_tokens: float
    variation: float
    most_tokens: int = MOST_TOKENS

    def __post_init__(self) -> None:
        if not 1 <= self.most_tokens <= MOST_TOKENS:
            raise InputError(
                f"most_tokens must be from 1 to {MOST_TOKENS} (is {self.most_tokens!r})"
            )
        if not 1 <= self.mean_tokens <= self.most_tokens:
            raise InputError(
                f"mean_tokens must be from 1 to {self.most_tokens} (is {self.mean_tokens!r})"
            )
        if not 0 <= self.variation < math.inf:
            raise InputError(f"variation must be 0 or more (is {self.variation!r})")

    def draw(self, count: int, generator: np.random.Generator) -> NDArray[np.int64]:
        variance = math.log1p(self.variation**2)
        drawn = generator.lognormal(
            math.log(self.mean_tokens) - variance / 2, math.sqrt(variance), count
        )
        return np.clip(np.rint(drawn), 1, self.most_tokens).astype(np.int64)


def poisson_trace(
    rate_per_s: float,
    count: int,
    prompt: Lengths,
    output: Lengths,
    generator: np.random.Generator,
) -> Trace:
    """Poisson arrivals with independent lengths. Raises InputError for a bad rate or count."""
    if not 0 < rate_per_s < math.inf:
        raise InputError(f"the rate must be a number above 0 (is {rate_per_s!r})")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InputError(f"the number of requests must be at least 1 (is {count!r})")
    return Trace(
        arrival_s=np.cumsum(generator.exponential(1 / rate_per_s, count)),
        prompt_tokens=prompt.draw(count, generator),
        output_tokens=output.draw(count, generator),
    )


def read_trace(path: Path) -> Trace:
    """A trace from a CSV file with the columns of COLUMNS, in any order; others are ignored.

    Raises InputError with the line and the field that is wrong.
    """
    try:
        return _read_lines(path, csv.DictReader(read_table(path)))
    except (UnicodeDecodeError, csv.Error) as failure:
        raise InputError(f"{path}: not a CSV file in UTF-8 ({failure})") from None


def _read_lines(path: Path, lines: csv.DictReader[str]) -> Trace:
    header = [str(name).strip() for name in lines.fieldnames or ()]
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        raise InputError(
            f"{path}: the column(s) {', '.join(missing)} are missing",
            hint=f"The first line must name {','.join(COLUMNS)}",
        )
    lines.fieldnames = header
    values: dict[str, list[float]] = {name: [] for name in COLUMNS}
    for line in lines:
        for name in COLUMNS:
            values[name].append(_number(f"{path}: line {lines.line_num}", name, line[name]))
        times = values["arrival_s"]
        if len(times) > 1 and times[-1] < times[-2]:
            raise InputError(
                f"{path}: line {lines.line_num}: arrival_s falls from {times[-2]:g} to"
                f" {times[-1]:g}",
                hint="Sort the lines by arrival_s",
            )
    if not values["arrival_s"]:
        raise InputError(f"{path}: there are no requests below the header")
    return Trace(
        arrival_s=np.array(values["arrival_s"]),
        prompt_tokens=np.array(values["prompt_tokens"]).astype(np.int64),
        output_tokens=np.array(values["output_tokens"]).astype(np.int64),
    )


def _number(where: str, name: str, text: str | None) -> float:
    if text is None or not text.strip():
        raise InputError(f"{where}: {name} is empty")
    try:
        value = float(text)
    except ValueError:
        raise InputError(f"{where}: {name} must be a number (is {text.strip()!r})") from None
    if name == "arrival_s":
        if not 0 <= value < math.inf:
            raise InputError(f"{where}: arrival_s must be 0 or later (is {text.strip()})")
    elif not 1 <= value <= MOST_TOKENS or value != int(value):
        raise InputError(
            f"{where}: {name} must be a whole number from 1 to {MOST_TOKENS} (is {text.strip()})"
        )
    return value
