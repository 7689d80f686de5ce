"""Latency goals, and how their text is read."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from costmodel.errors import InputError

PERCENTS = (50, 90, 95, 99)
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "": 1.0}
_HINT = "Use --slo tpot=30ms,ttft=1s for means, ttft.p95=1s for a percentile"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PercentileGoal:
    """So many percent of the requests see at most `seconds`."""

    metric: Literal["tpot", "ttft"]
    percent: int
    seconds: float

    def __post_init__(self) -> None:
        if self.metric not in ("tpot", "ttft"):
            raise InputError(f"no goal is called '{self.metric}'", hint=_HINT)
        if self.percent not in PERCENTS:
            names = ", ".join(f"p{percent}" for percent in PERCENTS)
            raise InputError(f"the percentile p{self.percent} is no goal", hint=f"Use {names}")
        _check_time(self.name, self.seconds)

    @property
    def name(self) -> str:
        """ttft.p95"""
        return f"{self.metric}.p{self.percent}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """Largest means that are allowed, None: any; and percentiles, which need a simulation."""

    tpot_s: float | None = None
    ttft_s: float | None = None
    percentiles: tuple[PercentileGoal, ...] = ()

    def __post_init__(self) -> None:
        for field in ("tpot_s", "ttft_s"):
            value = getattr(self, field)
            if value is not None:
                _check_time(field[:-2], value)

    def __bool__(self) -> bool:
        return self.tpot_s is not None or self.ttft_s is not None or bool(self.percentiles)

    @classmethod
    def parse(cls, text: str) -> Goals:
        """tpot=30ms,ttft=1s,ttft.p95=2s; any may be left out. Raises InputError."""
        means: dict[str, float] = {}
        percentiles: list[PercentileGoal] = []
        seen: set[str] = set()
        for part in parts(text):
            name, _, value = part.partition("=")
            name = name.strip().lower()
            metric, dot, percent = name.partition(".")
            if metric not in ("tpot", "ttft") or (dot and not re.fullmatch(r"p\d+", percent)):
                raise InputError(f"no goal is called '{name}'", hint=_HINT)
            if name in seen:
                raise InputError(f"the goal {name} is given twice")
            seen.add(name)
            if value.strip().replace(".", "", 1).isdecimal():  # 30 is hardly ever 30 s a token
                raise InputError(f"the goal {part} has no unit", hint=f"Write {part}ms or {part}s")
            seconds = parse_seconds(value)
            if dot:
                percentiles.append(
                    PercentileGoal(
                        metric="tpot" if metric == "tpot" else "ttft",
                        percent=int(percent[1:]),
                        seconds=seconds,
                    )
                )
            else:
                means[f"{metric}_s"] = seconds
        return cls(**means, percentiles=tuple(percentiles))

    def words(self) -> str:
        """30 ms a token, 1 s to the first, ttft.p95 2 s; `no goals` without any."""
        found = [f"{self.tpot_s * 1e3:g} ms a token"] if self.tpot_s else []
        found += [f"{self.ttft_s:g} s to the first"] if self.ttft_s else []
        found += [f"{goal.name} {seconds_text(goal.seconds)}" for goal in self.percentiles]
        return ", ".join(found) or "no goals"


def seconds_text(seconds: float) -> str:
    """30 ms, 1.2 s."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def parse_seconds(text: str) -> float:
    """30ms, 1s, 0.5. Raises InputError."""
    found = re.fullmatch(r"\s*([0-9.eE+-]+)\s*([a-z]*)\s*", text)
    if found and found[2] in _SECONDS:
        return number(found[1], text) * _SECONDS[found[2]]
    raise InputError(f"'{text}' is not a time", hint="Write 30ms or 1s")


def parts(text: str) -> list[str]:
    """What stands between commas, without spaces."""
    return [part.strip() for part in text.split(",") if part.strip()]


def number(text: str, whole: str) -> float:
    """A float of `text`, a part of `whole`. Raises InputError."""
    try:
        return float(text)
    except ValueError:
        raise InputError(f"'{whole}' has no number that can be read") from None


def _check_time(name: str, seconds: float) -> None:
    if not 0 < seconds < float("inf"):
        raise InputError(f"the goal {name} must be a time above 0 (is {seconds!r})")
