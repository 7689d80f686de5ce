"""Table of other engines in a result: plain and best mode of each, and this decoder over them."""

from __future__ import annotations

from lab.bench.analysis.ratios import compare_arms, rate, tally_arm
from lab.bench.record import PLAIN, Result
from lab.bench.report.tables import number_text, with_interval
from profiler.report.html import Row, Table

_COLUMNS = (
    "engine", "plain tokens/s", "plain here over it", "95 % interval", "its best arm", "tokens/s",
    "the best here", "over it", "95 % interval",
)  # fmt: skip


def engine_tables(result: Result) -> list[Table]:
    """A row for each engine, of whole calls; no table without engines."""
    if not result.engines:
        return []
    rates = {arm.name: rate(tally_arm(result, arm.name, "total")) or 0.0 for arm in result.arms}
    here = max(
        (arm.name for arm in result.arms if arm.kind != "peer"), key=lambda name: rates[name]
    )
    table = Table(
        name="engines",
        title="beside other engines, whole calls",
        columns=_COLUMNS,
        rows=[_row(result, engine.name, here, rates) for engine in result.engines],
        caption="Whole calls, the prefill included, from token ids to token ids. The best arms are "
        "those of the highest rate in this run.",
    )
    return [table]


def _row(result: Result, engine: str, here: str, rates: dict[str, float]) -> Row:
    names = [arm.name for arm in result.arms if arm.engine == engine]
    plain = next((name for name in names if name == f"{engine}:{PLAIN}"), None)
    best = max(names, key=lambda name: rates[name], default=None)
    over_plain = None if plain is None else compare_arms(result, PLAIN, plain, "total")
    over_best = None if best is None else compare_arms(result, here, best, "total")
    versions = next(one.versions for one in result.engines if one.name == engine)
    return [
        " ".join([engine, *list(versions.values())[:1]]),
        number_text(None if plain is None else rates[plain], ".1f"),
        *with_interval(over_plain),
        best,
        number_text(None if best is None else rates[best], ".1f"),
        here,
        *with_interval(over_best),
    ]
