"""Figures as the cells of a table; None where there is none."""

from __future__ import annotations

from profiler.bench.analysis import Ratio


def ratio_text(ratio: Ratio | None) -> str | None:
    return None if ratio is None else f"{ratio.pooled:.2f}x"


def interval_text(ratio: Ratio | None) -> str | None:
    if ratio is None or ratio.low is None or ratio.high is None:
        return None
    return f"{ratio.low:.2f}-{ratio.high:.2f}"


def number_text(value: float | None, form: str, unit: str = "") -> str | None:
    return None if value is None else format(value, form) + unit
