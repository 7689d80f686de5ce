"""Tables of drafters beside each other, the same for the terminal and the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from profiler.bench.cells import interval_text, number_text, ratio_text
from profiler.bench.families import Family, Member, Updates, ablations, block_sizes, updates
from profiler.bench.record import Result

UPDATES = (
    "arm", "updates", "rollbacks", "seconds of updates", "of its time", "decoding: tokens/s",
    "over plain", "95 % interval", "end to end: tokens/s", "over plain", "95 % interval",
)  # fmt: skip
GAINS = (
    "arm", "over", "decoding", "95 % interval", "end to end", "95 % interval",
    "tokens/verification", "without updates",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A table; `name` is its id on the page."""

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | None]]
    caption: str


def sections(result: Result) -> list[Section]:
    """Those that a run has data for."""
    learnt = updates(result)
    wanted = (
        _updates(learnt),
        _gains(learnt),
        _ablations(ablations(result)),
        _blocks(block_sizes(result)),
    )
    return [section for section in wanted if section.rows]


def counts(found: Mapping[str, int]) -> str:
    """As '3 heads, 1 full'."""
    return ", ".join(f"{count} {name}" for name, count in sorted(found.items())) or "none"


def _updates(found: Sequence[Updates]) -> Section:
    rows = [
        [
            own.arm,
            counts(own.updates),
            f"{own.rollbacks}",
            f"{own.update_s:.2f}",
            f"{own.update_share:.1%}",
            number_text(own.tokens_per_s, ".1f"),
            ratio_text(own.over_plain),
            interval_text(own.over_plain),
            number_text(own.end_to_end_tokens_per_s, ".1f"),
            ratio_text(own.end_to_end_over_plain),
            interval_text(own.end_to_end_over_plain),
        ]
        for own in found
    ]
    return Section(
        name="updates",
        title="Updates while serving",
        columns=UPDATES,
        rows=rows,
        caption="Drafters that learn between texts, in the order of the prompts. Decoding leaves "
        "their updates out; end to end holds the prefill and every update.",
    )


def _gains(found: Sequence[Updates]) -> Section:
    rows = [
        [
            own.arm,
            own.fixed,
            ratio_text(own.over_fixed),
            interval_text(own.over_fixed),
            ratio_text(own.end_to_end_over_fixed),
            interval_text(own.end_to_end_over_fixed),
            number_text(own.tokens_per_verification, ".2f"),
            number_text(own.fixed_tokens_per_verification, ".2f"),
        ]
        for own in found
        if own.fixed is not None
    ]
    return Section(
        name="gains",
        title="What the updates gained",
        columns=GAINS,
        rows=rows,
        caption="Against the arm of the same policy whose drafter keeps the weights that this one "
        "began with; paired by prompt.",
    )


def _ablations(found: Sequence[Family]) -> Section:
    return Section(
        name="ablations",
        title="SpecBlock's ablations",
        columns=_columns("lacks", "over the whole drafter"),
        rows=_rows(found, lambda own: ", ".join(own.without) or "nothing"),
        caption="SpecBlock drafters trained without parts of the method (the paper's table 2), "
        "decoding alone; the last ratio is paired by prompt.",
    )


def _blocks(found: Sequence[Family]) -> Section:
    return Section(
        name="blocks",
        title="DFlash's block sizes and BlockPilot",
        columns=_columns("block", "over BlockPilot"),
        rows=_rows(found, lambda own: f"{own.block_size or 'by prompt'}"),
        caption="One DFlash drafter with fixed blocks, and with those that BlockPilot's predictor "
        "chooses for each prompt, decoding alone; the last ratio is paired by prompt.",
    )


def _columns(differs: str, base: str) -> tuple[str, ...]:
    return (
        "arm", differs, "tokens/verification", "tokens/s", "over plain", "95 % interval", base,
        "95 % interval",
    )  # fmt: skip


def _rows(found: Sequence[Family], differs: Callable[[Member], str]) -> list[list[str | None]]:
    return [
        [
            own.arm,
            differs(own),
            number_text(own.tokens_per_verification, ".2f"),
            number_text(own.tokens_per_s, ".1f"),
            ratio_text(own.over_plain),
            interval_text(own.over_plain),
            ratio_text(own.over_base),
            interval_text(own.over_base),
        ]
        for family in found
        for own in family.members
    ]
