"""The tables of a benchmark's page: the figures of the JSON, rounded."""

from __future__ import annotations

from collections.abc import Sequence

from profiler.bench import markup
from profiler.bench.analysis import Ratio
from profiler.bench.cells import interval_text, number_text, ratio_text
from profiler.bench.figures import CostError
from profiler.bench.sections import sections
from profiler.bench.tables import COLUMNS, arm_cells
from profiler.bench.view import View

MORE = (
    "arm", "end-to-end tokens/s", "end to end over plain", "95 % interval", "median of prompts",
    "worst prompt", "best prompt", "tokens/verification, mean of texts", "rounds", "with a draft",
    "texts", "ended by themselves", "peak memory", "of the bandwidth limit",
)  # fmt: skip
ACCURACY = (
    "arm", "forward: error", "95th percentile", "bias", "round: error", "95th percentile", "bias",
    "foretold tokens", "committed tokens", "Pearson", "Spearman",
)  # fmt: skip
DEPTH = ("arm", "depth", "reached", "accepted", "share", "foretold share", "realised share")


def arms_table(view: View) -> str:
    rows = [arm_cells(view.figures(arm.name)) for arm in view.result.arms]
    return _table(
        "arms", COLUMNS, rows,
        "Decoding alone but for 'end to end'. First token and per token are medians over texts; "
        "'drafting' is its share of the time of all stages; 'differing' counts texts that are "
        "not those of plain decoding. End to end holds the updates of drafters that learn, too.",
    )  # fmt: skip


def sets_table(view: View) -> str:
    """Nothing where there is one prompt set only."""
    sets = view.result.sets
    if len(sets) < 2:
        return ""
    columns = ["arm"]
    for name in sets:
        columns += [name, "95 % interval", "tokens/verification"]
    rows: list[list[str | None]] = []
    for arm in view.result.arms:
        row: list[str | None] = [arm.name]
        for name in sets:
            own = view.figures(arm.name, name)
            kept = number_text(own.tokens_per_verification, ".2f")
            row += [ratio_text(own.over_plain), interval_text(own.over_plain), kept]
        rows.append(row)
    return _table("sets", columns, rows, "Over plain decoding by prompt set, decoding alone.")


def more_table(view: View) -> str:
    rows = []
    for arm in view.result.arms:
        own = view.figures(arm.name)
        plain, whole, checked = own.over_plain, own.over_plain_end_to_end, own.verification
        rows.append([
            arm.name,
            number_text(own.end_to_end_tokens_per_s, ".1f"),
            ratio_text(whole),
            interval_text(whole),
            *(number_text(value, ".2f", "x") for value in
              ((None,) * 3 if plain is None else (plain.median, plain.least, plain.most))),
            number_text(None if checked is None else checked.mean, ".2f"),
            number_text(own.rounds, "d"),
            number_text(own.drafted_share, ".1%"),
            f"{own.responses}",
            f"{own.ended}",
            None if own.peak_memory_bytes is None else f"{own.peak_memory_bytes / 2**20:.0f} MiB",
            number_text(own.bandwidth_share, ".0%"),
        ])  # fmt: skip
    return markup.folded(
        "More of each arm",
        _table("more", MORE, rows, "Prompts by their ratio over plain decoding, decoding alone."),
    )


def drafter_tables(view: View) -> list[str]:
    """Updates, ablations and block sizes, each with its heading, where there are any."""
    return [
        part
        for own in sections(view.result)
        for part in (
            markup.heading(own.title),
            _table(own.name, own.columns, own.rows, own.caption),
        )
    ]


def sweep_tables(view: View) -> list[str]:
    """For each swept drafter: its sizes, and the arms against sizes chosen in hindsight."""
    parts = []
    for number, (drafter, sweep) in enumerate(view.hindsight.items(), start=1):
        sizes = [
            [f"{size.nodes}", f"{size.tokens_per_s:.1f}", ratio_text(ratio), interval_text(ratio),
             ", ".join(name for name, best in sweep.set_best.items() if best == size.arm)]
            for size in sweep.sizes
            for ratio in [view.figures(size.arm).over_plain]
        ]  # fmt: skip
        parts.append(_table(
            f"sizes-{number}", ("nodes", "tokens/s", "over plain", "95 % interval", "best size of"),
            sizes, f"Fixed tree sizes with {drafter}; 0 is plain decoding.",
        ))  # fmt: skip
        against = [
            [own.arm, *_both(own.single), *_both(own.per_set), *_both(own.per_prompt),
             None if own.single is None else own.single.verdict]
            for own in sweep.against
        ]  # fmt: skip
        parts.append(_table(
            f"hindsight-{number}",
            ("arm", f"over {sweep.single_best}", "95 % interval", "over the best of each set",
             "95 % interval", "over the best of each prompt", "95 % interval",
             f"than {sweep.single_best}"),
            against,
            f"Arms with {drafter} against fixed sizes picked knowing the outcome: the single best "
            "one, the best of each prompt set, the best of each prompt (which also profits from "
            "the noise of the timings).",
        ))  # fmt: skip
    return parts


def accuracy_table(view: View) -> str:
    """What the arms went by against what happened; nothing where no arm drafted."""
    rows = []
    for arm in view.speculating:
        own = view.figures(arm.name)
        paths = own.path_scores
        rows.append([
            arm.name,
            *_errors(own.verify_error),
            *_errors(own.cycle_error),
            *((None,) * 4 if paths is None else (
                f"{paths.predicted_mean:.2f}", f"{paths.realised_mean:.2f}",
                number_text(paths.pearson, ".2f"), number_text(paths.spearman, ".2f"))),
        ])  # fmt: skip
    if not rows:
        return ""
    return _table(
        "accuracy", ACCURACY, rows,
        "Seconds of the target's forward and of a whole round as the cost model foretold them "
        "before each round: median relative error, 95th percentile, and signed median. Tokens: "
        "means over rounds with a tree, the bonus token counted.",
    )  # fmt: skip


def depth_table(view: View) -> str:
    rows = [
        [
            arm.name,
            f"{one.depth}",
            f"{one.reached}",
            f"{one.accepted}",
            f"{one.accepted / one.reached:.1%}" if one.reached else None,
            f"{one.predicted / one.rounds:.1%}",
            f"{one.realised / one.rounds:.1%}",
        ]
        for arm in view.speculating
        for one in view.figures(arm.name).depths
    ]
    return _table(
        "depths", DEPTH, rows,
        "Reached: rounds whose tree goes so deep and that accepted every level above. Foretold "
        "and realised are shares of all rounds with a tree.",
    )  # fmt: skip


def _both(ratio: Ratio | None) -> tuple[str | None, str | None]:
    return ratio_text(ratio), interval_text(ratio)


def _errors(error: CostError | None) -> list[str | None]:
    if error is None:
        return [None] * 3
    return [
        number_text(error.median, ".1%"),
        number_text(error.p95, ".1%"),
        number_text(error.bias, "+.1%"),
    ]


def _table(
    name: str, columns: Sequence[str], rows: Sequence[Sequence[str | None]], caption: str
) -> str:
    """None is shown as a dash."""
    cells = [["-" if cell is None else cell for cell in row] for row in rows]
    return markup.table(name, columns, cells, caption)
