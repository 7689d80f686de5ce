"""Tables of related drafters: online updates, SpecBlock's ablations, DFlash's block sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lab.bench.analysis.families import (
    Family,
    FamilyArm,
    UpdateFigures,
    ablations,
    block_sizes,
    update_figures,
)
from lab.bench.record import Result
from lab.bench.report.tables import number_text, with_interval
from profiler.report.html import Row, Table

UPDATES = (
    "arm", "updates", "rollbacks", "seconds of updates", "of its time", "decoding: tokens/s",
    "over plain", "95 % interval", "end to end: tokens/s", "over plain", "95 % interval",
)  # fmt: skip
GAINS = (
    "arm", "over", "decoding", "95 % interval", "end to end", "95 % interval",
    "tokens/verification", "without updates",
)  # fmt: skip


def drafter_tables(result: Result) -> list[Table]:
    """The tables that the run has data for."""
    learners = update_figures(result)
    tables = (
        _updates(learners),
        _gains(learners),
        _ablations(ablations(result)),
        _block_sizes(block_sizes(result)),
    )
    return [table for table in tables if table.rows]


def _updates(learners: Sequence[UpdateFigures]) -> Table:
    rows = [
        [
            learner.arm,
            _counts(learner.updates),
            f"{learner.rollbacks}",
            f"{learner.update_s:.2f}",
            f"{learner.update_share:.1%}",
            number_text(learner.tokens_per_s, ".1f"),
            *with_interval(learner.over_plain),
            number_text(learner.end_to_end_tokens_per_s, ".1f"),
            *with_interval(learner.end_to_end_over_plain),
        ]
        for learner in learners
    ]
    return Table(
        name="updates",
        title="Updates while serving",
        columns=UPDATES,
        rows=rows,
        caption="Drafters that learn between texts, in the order of the prompts. Decoding leaves "
        "their updates out; end to end holds the prefill and every update.",
    )


def _counts(counts: Mapping[str, int]) -> str:
    """Counts as '1 full, 3 heads'."""
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"


def _gains(learners: Sequence[UpdateFigures]) -> Table:
    rows = [
        [
            learner.arm,
            learner.fixed,
            *with_interval(learner.over_fixed, learner.end_to_end_over_fixed),
            number_text(learner.tokens_per_verification, ".2f"),
            number_text(learner.fixed_tokens_per_verification, ".2f"),
        ]
        for learner in learners
        if learner.fixed is not None
    ]
    return Table(
        name="gains",
        title="What the updates gained",
        columns=GAINS,
        rows=rows,
        caption="Against the arm of the same policy whose drafter keeps the weights that this one "
        "began with; paired by prompt.",
    )


def _ablations(families: Sequence[Family]) -> Table:
    return Table(
        name="ablations",
        title="SpecBlock's ablations",
        columns=_family_columns("lacks", "over the whole drafter"),
        rows=_family_rows(families, lambda member: ", ".join(member.without) or "nothing"),
        caption="SpecBlock drafters trained without parts of the method (the paper's table 2), "
        "decoding alone; the last ratio is paired by prompt.",
    )


def _block_sizes(families: Sequence[Family]) -> Table:
    return Table(
        name="blocks",
        title="DFlash's block sizes and BlockPilot",
        columns=_family_columns("block", "over BlockPilot"),
        rows=_family_rows(families, lambda member: f"{member.block_size or 'by prompt'}"),
        caption="One DFlash drafter with fixed blocks, and with those that BlockPilot's predictor "
        "chooses for each prompt, decoding alone; the last ratio is paired by prompt.",
    )


def _family_columns(difference: str, base: str) -> tuple[str, ...]:
    return (
        "arm", difference, "tokens/verification", "tokens/s", "over plain", "95 % interval", base,
        "95 % interval",
    )  # fmt: skip


def _family_rows(families: Sequence[Family], difference: Callable[[FamilyArm], str]) -> list[Row]:
    """One row for each arm; `difference` tells its drafter from the others of the family."""
    return [
        [
            member.arm,
            difference(member),
            number_text(member.tokens_per_verification, ".2f"),
            number_text(member.tokens_per_s, ".1f"),
            *with_interval(member.over_plain, member.over_base),
        ]
        for family in families
        for member in family.members
    ]
