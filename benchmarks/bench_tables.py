"""A stored result of `rooftree bench` as Markdown tables, for the README and docs/benchmark.md."""

from __future__ import annotations

from collections.abc import Iterable

from profiler.bench.analysis import Ratio, compare_arms
from profiler.bench.cells import interval_text, number_text, ratio_text
from profiler.bench.figures import arm_figures
from profiler.bench.hindsight import Against, Hindsight, hindsight
from profiler.bench.record import PLAIN, Arm, Result
from profiler.bench.sections import sections

LOOKUP = "transformers:prompt-lookup"
ABSENT = "-"


def heading(result: Result) -> str:
    """One sentence: what was run, on what, and what the ratios are."""
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
        f"T = {settings.temperature:g}, up to {settings.new_tokens} new tokens"
        f"{', our arms writing the text of plain decoding' if settings.same_text else ''}"
        f"{', round by round in turn' if settings.by_round else ''}; "
        f"prompts: {prompts}; decoding alone, ratios pooled over prompts with 95 % bootstrap "
        "intervals."
    )


def arm_table(result: Result, names: Iterable[str]) -> list[str]:
    """A row an arm: tokens a verification, and how many times as fast as what."""
    lines = [
        "| arm | tokens a verification | over plain | over `chain` | over prompt lookup |"
        " over the best size | over the best of each set |",
        "|---|---|---|---|---|---|---|",
    ]
    against = {own.arm: own for sweep in _sweeps(result) for own in sweep.against}
    return lines + [_row(result, result.arm(name), against.get(name)) for name in names]


def main_arms(result: Result) -> list[str]:
    """The arms to name first: those of `--policy`, the best size of each sweep, the peers."""
    best = {sweep.single_best for sweep in _sweeps(result)}
    return [arm.name for arm in result.arms if "policies" in arm.studies or arm.name in best]


def sweep_table(result: Result) -> list[str]:
    """A row a drafter: tokens/s of each size, 0 being plain decoding; none without a sweep."""
    sweeps = _sweeps(result)
    sizes = sorted({size.nodes for sweep in sweeps for size in sweep.sizes})
    if not sizes:
        return []
    lines = [
        f"| tokens/s by nodes | {' | '.join(map(str, sizes))} |",
        "|---" * (len(sizes) + 1) + "|",
    ]
    for sweep in sweeps:
        rates = {size.nodes: f"{size.tokens_per_s:.1f}" for size in sweep.sizes}
        cells = " | ".join(rates.get(nodes, ABSENT) for nodes in sizes)
        lines.append(f"| {sweep.drafter} | {cells} |")
    return lines


def set_table(result: Result) -> list[str]:
    """A row an arm: over plain decoding (and tokens a verification) by prompt set."""
    lines = [f"| arm | {' | '.join(result.sets)} |", "|---" * (len(result.sets) + 1) + "|"]
    for arm in result.arms:
        if arm.name != PLAIN:
            cells = [_set_cell(result, arm.name, name) for name in result.sets]
            lines.append(f"| {arm.name} | {' | '.join(cells)} |")
    return lines


def family_tables(result: Result) -> list[str]:
    """SpecBlock's ablations, block sizes and updates, where the run has them."""
    lines = []
    for section in sections(result):
        lines += [f"{section.title}:", "", _markdown(section.columns)]
        lines += ["|---" * len(section.columns) + "|", *map(_markdown, section.rows), ""]
    return lines[:-1]


def _markdown(cells: Iterable[str | None]) -> str:
    return f"| {' | '.join(cell or ABSENT for cell in cells)} |"


def _row(result: Result, arm: Arm, against: Against | None) -> str:
    own = arm_figures(result, arm.name)
    ours = arm.kind == "policy"
    arms = {one.name for one in result.arms}

    def over(base: str, wanted: bool) -> str:
        known = wanted and base in arms and base != arm.name
        return _cell(compare_arms(result, arm.name, base) if known else None)

    cells = (
        arm.name,
        number_text(own.tokens_per_verification, ".2f") or ABSENT,
        ABSENT if arm.kind == "plain" else _cell(own.over_plain),
        over(f"chain+{arm.drafter}", ours),
        over(LOOKUP, ours),
        _cell(against and against.single),
        _cell(against and against.per_set),
    )
    return f"| {' | '.join(cells)} |"


def _set_cell(result: Result, arm: str, prompt_set: str) -> str:
    own = arm_figures(result, arm, prompt_set)
    length = number_text(own.tokens_per_verification, ".2f")
    return f"{ratio_text(own.over_plain) or ABSENT}" + ("" if length is None else f" ({length})")


def _cell(ratio: Ratio | None) -> str:
    if ratio is None:
        return ABSENT
    interval = interval_text(ratio)
    return f"{ratio_text(ratio)}" + ("" if interval is None else f" ({interval})")


def _sweeps(result: Result) -> list[Hindsight]:
    found = [hindsight(result, drafter.name) for drafter in result.drafters]
    return [sweep for sweep in found if sweep is not None]
