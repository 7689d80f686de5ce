"""A stored result of `rooftree bench` as Markdown tables, for the README and docs/benchmark.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lab.bench.analysis.hindsight import HindsightRatios
from lab.bench.analysis.ratios import Ratio, compare_arms
from lab.bench.analysis.summary import ResultFigures
from lab.bench.record import Arm, Result
from lab.bench.report.tables import interval_text, number_text, ratio_text

LOOKUP = "transformers:prompt-lookup"
ABSENT = "-"


def heading(result: Result) -> str:
    """One sentence: machine, target, settings and prompts."""
    machine, settings = result.environment, result.settings
    counts = {name: sum(one.set == name for one in result.prompts) for name in result.sets}
    prompts = ", ".join(f"{count} of {name}" for name, count in counts.items())
    versions = [
        f"{name} {machine.fields[field]}"
        for name, field in (("torch", "torch_version"), ("transformers", "transformers_version"))
        if machine.fields.get(field)
    ]
    return (
        f"{', '.join([machine.device, f'{machine.threads} threads', *versions])}, "
        f"{machine.created_utc[:10]}; {result.target.name}, {settings.dtype}, "
        f"runtime {settings.runtime}, "
        f"T = {settings.temperature:g}, up to {settings.new_tokens} new tokens"
        f"{', --same-text' if settings.same_text else ''}"
        f"{', --by-round' if settings.by_round else ''}; prompts: {prompts}."
    )


def arm_table(result: Result, names: Iterable[str]) -> list[str]:
    """A row for each arm: tokens per verification, and its speed over what the run has."""
    figures = ResultFigures(result)
    against = {own.arm: own for sweep in figures.hindsight.values() for own in sweep.against}
    columns = (
        "arm", "tokens a verification", "over plain", "over `chain`", "over prompt lookup",
        "over the best size", "over the best of each set",
    )  # fmt: skip
    rows = [_arm_cells(figures, result.arm(name), against.get(name)) for name in names]
    filled = [one for one in zip(columns, *rows, strict=True) if any(one[1:])]
    head, *body = zip(*filled, strict=True)
    return markdown(head, body)


def main_arms(result: Result) -> list[str]:
    """The names of the arms of `--policy`, the best size of each sweep, and the peers."""
    best = {sweep.single_best for sweep in ResultFigures(result).hindsight.values()}
    return [arm.name for arm in result.arms if "policies" in arm.studies or arm.name in best]


def sweep_table(result: Result) -> list[str]:
    """A row for each drafter: tokens/s by size, 0 being plain decoding; empty without a sweep."""
    sweeps = ResultFigures(result).hindsight.values()
    sizes = sorted({size.nodes for sweep in sweeps for size in sweep.sizes})
    if not sizes:
        return []
    rows = []
    for sweep in sweeps:
        rates = {size.nodes: f"{size.tokens_per_s:.1f}" for size in sweep.sizes}
        rows.append([sweep.drafter, *map(rates.get, sizes)])
    return markdown(["tokens/s by nodes", *map(str, sizes)], rows)


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str | None]]) -> list[str]:
    """The lines of a Markdown table, None as a dash."""
    head, *body = (f"| {' | '.join(cell or ABSENT for cell in row)} |" for row in (columns, *rows))
    return [head, "|---" * len(columns) + "|", *body]


def _arm_cells(
    figures: ResultFigures, arm: Arm, against: HindsightRatios | None
) -> list[str | None]:
    result, own = figures.result, figures.of(arm.name)
    names = {one.name for one in result.arms}

    def over(base: str) -> str | None:
        comparable = arm.kind == "policy" and base in names and base != arm.name
        return _cell(compare_arms(result, arm.name, base) if comparable else None)

    return [
        arm.name, number_text(own.tokens_per_verification, ".2f"),
        None if arm.kind == "plain" else _cell(own.over_plain), over(f"chain+{arm.drafter}"),
        over(LOOKUP), _cell(against and against.single), _cell(against and against.per_set),
    ]  # fmt: skip


def _cell(ratio: Ratio | None) -> str | None:
    interval = interval_text(ratio)
    return f"{ratio_text(ratio)} ({interval})" if interval else ratio_text(ratio)
