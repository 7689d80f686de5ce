"""Tables of a benchmark result: arms, prompt sets, sweeps, accuracy of predictions.

A table is text cells with a title and a caption. The page shows them as HTML, the terminal and
the Markdown of the docs show some of them.
"""

from __future__ import annotations

from lab.bench.analysis.figures import ArmFigures, CostError
from lab.bench.analysis.ratios import Ratio
from lab.bench.analysis.summary import ResultFigures
from profiler.report.html import Row, Table

ARMS = (
    "arm", "tokens/s", "over plain", "95 % interval", "end to end", "first token", "per token",
    "tokens/verification", "without bonus", "nodes", "drafting", "differing",
)  # fmt: skip
MORE = (
    "arm", "end-to-end tokens/s", "end to end over plain", "95 % interval", "median of prompts",
    "worst prompt", "best prompt", "tokens/verification, mean of texts", "rounds", "with a draft",
    "texts", "ended by themselves", "peak memory", "of the bandwidth limit",
)  # fmt: skip
SIZES = ("nodes", "tokens/s", "over plain", "95 % interval", "best size of")
ACCURACY = (
    "arm", "forward: error", "95th percentile", "bias", "round: error", "95th percentile", "bias",
    "predicted tokens", "committed tokens", "Pearson", "Spearman",
)  # fmt: skip
DEPTHS = ("arm", "depth", "reached", "accepted", "share", "predicted share", "realised share")


def ratio_text(ratio: Ratio | None) -> str | None:
    return None if ratio is None else f"{ratio.pooled:.2f}x"


def interval_text(ratio: Ratio | None) -> str | None:
    if ratio is None or ratio.low is None or ratio.high is None:
        return None
    return f"{ratio.low:.2f}-{ratio.high:.2f}"


def with_interval(*ratios: Ratio | None) -> list[str | None]:
    """Two cells for each ratio: itself and its interval."""
    return [text for ratio in ratios for text in (ratio_text(ratio), interval_text(ratio))]


def number_text(value: float | None, form: str, unit: str = "") -> str | None:
    return None if value is None else format(value, form) + unit


def arms_table(figures: ResultFigures) -> Table:
    return Table(
        name="arms",
        columns=ARMS,
        rows=[
            *(_arm_cells(figures.of(arm.name)) for arm in figures.result.arms),
            *([one.name, "failed", *[None] * (len(ARMS) - 2)] for one in figures.result.failed),
        ],
        caption="Decoding alone but for 'end to end'. First token and per token are medians over "
        "texts; 'drafting' is its share of the time of all stages; 'differing' counts texts that "
        "are not those of plain decoding. End to end holds the updates of drafters that learn, "
        "too.",
    )


def _arm_cells(figures: ArmFigures) -> Row:
    verification = figures.verification
    return [
        figures.arm,
        number_text(figures.tokens_per_s, ".1f"),
        *with_interval(figures.over_plain),
        ratio_text(figures.over_plain_end_to_end),
        f"{1e3 * figures.first_token_s:.1f} ms",
        None if figures.per_token_s is None else f"{1e3 * figures.per_token_s:.2f} ms",
        None if verification is None else f"{verification.pooled:.2f}",
        None if verification is None else f"{verification.pooled_without_bonus:.2f}",
        number_text(figures.nodes_mean, ".1f"),
        number_text(figures.draft_time_share, ".1%"),
        number_text(figures.differing, "d"),
    ]


def sets_table(figures: ResultFigures) -> Table:
    """Speed over plain decoding by prompt set, one group of columns for each set."""
    sets = figures.result.sets
    rows = []
    for arm in figures.result.arms:
        row: list[str | None] = [arm.name]
        for name in sets:
            one = figures.of(arm.name, name)
            row += [
                *with_interval(one.over_plain),
                number_text(one.tokens_per_verification, ".2f"),
            ]
        rows.append(row)
    return Table(
        name="sets",
        columns=[
            "arm",
            *(column for name in sets for column in (name, "95 % interval", "tokens/verification")),
        ],
        rows=rows,
        caption="Over plain decoding by prompt set, decoding alone.",
    )


def more_table(figures: ResultFigures) -> Table:
    return Table(
        name="more",
        columns=MORE,
        rows=[_more_cells(figures.of(arm.name)) for arm in figures.result.arms],
        caption="Prompts by their ratio over plain decoding, decoding alone.",
    )


def _more_cells(figures: ArmFigures) -> Row:
    plain, verification = figures.over_plain, figures.verification
    memory_bytes = figures.peak_memory_bytes
    by_prompt = (None,) * 3 if plain is None else (plain.median, plain.least, plain.most)
    return [
        figures.arm,
        number_text(figures.end_to_end_tokens_per_s, ".1f"),
        *with_interval(figures.over_plain_end_to_end),
        *(number_text(ratio, ".2f", "x") for ratio in by_prompt),
        number_text(None if verification is None else verification.mean, ".2f"),
        number_text(figures.rounds, "d"),
        number_text(figures.drafted_share, ".1%"),
        f"{figures.responses}",
        f"{figures.ended}",
        None if memory_bytes is None else f"{memory_bytes / 2**20:.0f} MiB",
        number_text(figures.bandwidth_share, ".0%"),
    ]


def sweep_tables(figures: ResultFigures) -> list[Table]:
    """Two tables for each swept drafter: its sizes, and the arms against the best of them."""
    tables = []
    for number, (drafter, sweep) in enumerate(figures.hindsight.items(), start=1):
        best_of = {
            size.arm: ", ".join(name for name, best in sweep.set_best.items() if best == size.arm)
            for size in sweep.sizes
        }
        sizes = Table(
            name=f"sizes-{number}",
            columns=SIZES,
            rows=[
                [
                    f"{size.nodes}",
                    f"{size.tokens_per_s:.1f}",
                    *with_interval(figures.of(size.arm).over_plain),
                    best_of[size.arm],
                ]
                for size in sweep.sizes
            ],
            caption=f"Fixed tree sizes with {drafter}; 0 is plain decoding.",
        )
        against = Table(
            name=f"hindsight-{number}",
            columns=(
                "arm", f"over {sweep.single_best}", "95 % interval", "over the best of each set",
                "95 % interval", "over the best of each prompt", "95 % interval",
                f"than {sweep.single_best}",
            ),
            rows=[
                [
                    ratios.arm,
                    *with_interval(ratios.single, ratios.per_set, ratios.per_prompt),
                    None if ratios.single is None else ratios.single.verdict,
                ]
                for ratios in sweep.against
            ],
            caption=f"Arms with {drafter} against fixed sizes picked knowing the outcome: the "
            "single best one, the best of each prompt set, the best of each prompt (which also "
            "profits from the noise of the timings).",
        )  # fmt: skip
        tables += [sizes, against]
    return tables


def accuracy_table(figures: ResultFigures) -> Table:
    """Predictions of the speculating arms against their outcomes."""
    rows = []
    for arm in figures.speculating:
        one = figures.of(arm.name)
        paths = one.path_scores
        tokens: Row = [None] * 4 if paths is None else [
            f"{paths.predicted_mean:.2f}", f"{paths.realised_mean:.2f}",
            number_text(paths.pearson, ".2f"), number_text(paths.spearman, ".2f"),
        ]  # fmt: skip
        rows.append(
            [arm.name, *_error_cells(one.verify_error), *_error_cells(one.cycle_error), *tokens]
        )
    return Table(
        name="accuracy",
        columns=ACCURACY,
        rows=rows,
        caption="Seconds of the target's forward and of a whole round as the cost model "
        "predicted them before each round: median relative error, 95th percentile, and signed "
        "median. Tokens: means over rounds with a tree, the bonus token counted.",
    )


def _error_cells(error: CostError | None) -> Row:
    if error is None:
        return [None] * 3
    return [
        number_text(error.median, ".1%"),
        number_text(error.p95, ".1%"),
        number_text(error.bias, "+.1%"),
    ]


def depths_table(figures: ResultFigures) -> Table:
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
        for arm in figures.speculating
        for one in figures.of(arm.name).depths
    ]
    return Table(
        name="depths",
        title="Acceptance by depth, in numbers",
        columns=DEPTHS,
        rows=rows,
        caption="Reached: rounds whose tree goes so deep and that accepted every level above. "
        "Predicted and realised are shares of all rounds with a tree.",
    )
