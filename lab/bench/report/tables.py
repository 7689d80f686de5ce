"""Tables of a benchmark result as text: arms, prompt sets, engines, related drafters, sweeps.

The terminal shows all of them, the Markdown of the docs some.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lab.bench.analysis.families import Family, FamilyArm, ablations, block_sizes, update_figures
from lab.bench.analysis.figures import ArmFigures
from lab.bench.analysis.hindsight import Hindsight
from lab.bench.analysis.papers import BASELINES, paper_figures
from lab.bench.analysis.ratios import Ratio, compare_arms, rate, tally_arm
from lab.bench.analysis.summary import ResultFigures
from lab.bench.record import PLAIN, Result

Row = Sequence[str | None]

INTERVAL = "95 % interval"
ARMS = (
    "arm", "tokens/s", "over plain", INTERVAL, "end to end", "first token", "per token",
    "tokens/verification", "without bonus", "nodes", "drafting", "differing",
)  # fmt: skip
PAPERS = (
    "arm", "tau", "tau of texts", "tau / (D + 2)", "T_D", "tokens/s", "std",
    *(f"{what} over {base}" for what in ("TPOT", "calls") for base in BASELINES),
)  # fmt: skip
ENGINES = (
    "engine", "plain tokens/s", "plain here over it", INTERVAL, "its best arm", "tokens/s",
    "the best here", "over it", INTERVAL,
)  # fmt: skip
UPDATES = (
    "arm", "updates", "rollbacks", "seconds of updates", "of its time", "decoding: tokens/s",
    "over plain", INTERVAL, "end to end: tokens/s", "over plain", INTERVAL,
)  # fmt: skip
GAINS = (
    "arm", "over", "decoding", INTERVAL, "end to end", INTERVAL, "tokens/verification",
    "without updates",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of text cells, None where there is no figure."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Row]


def heading(result: Result) -> str:
    """One line: target, machine, prompts and settings."""
    settings, machine = result.settings, result.environment
    threads = "" if machine.threads is None else f", {machine.threads} thread"
    threads += "s" if (machine.threads or 0) > 1 else ""
    repeats = f" x {settings.repeats}" if settings.repeats > 1 else ""
    template = "".join(f", {name}={value}" for name, value in settings.template.items())
    texts = ", our arms writing plain decoding's text" if settings.same_text else ""
    texts += ", round by round in turn" if settings.by_round else ""
    length = f"{'' if settings.ignore_eos else 'up to '}{settings.new_tokens} new tokens"
    return (
        f"{result.target.name} ({settings.dtype}, {settings.runtime}) on {machine.device}{threads}"
        f": {len(result.prompts)} prompts{repeats} of {', '.join(result.sets)}, "
        f"{length}, T = {settings.temperature:g}{template}{texts}"
    )


def ratio_text(ratio: Ratio | None) -> str | None:
    return None if ratio is None else f"{ratio.pooled:.2f}x"


def interval_text(ratio: Ratio | None) -> str | None:
    if ratio is None or ratio.low is None or ratio.high is None:
        return None
    return f"{ratio.low:.2f}-{ratio.high:.2f}"


def with_interval(*ratios: Ratio | None) -> list[str | None]:
    """Two cells for each ratio: itself and its interval."""
    return [text for ratio in ratios for text in (ratio_text(ratio), interval_text(ratio))]


def number_text(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)


def arms_table(figures: ResultFigures) -> Table:
    return Table(
        title="All arms",
        columns=ARMS,
        rows=[
            *(_arm_cells(figures.of(arm.name)) for arm in figures.result.arms),
            *([one.name, "failed", *[None] * (len(ARMS) - 2)] for one in figures.result.failed),
        ],
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
            row += [*with_interval(one.over_plain), number_text(one.tokens_per_verification, ".2f")]
        rows.append(row)
    return Table(
        title="By prompt set",
        columns=[
            "arm",
            *(column for name in sets for column in (name, "95 % interval", "tokens/verification")),
        ],
        rows=rows,
    )


def papers_table(result: Result) -> Table:
    """The arms by the papers' own definitions (lab/bench/analysis/papers.py)."""
    rows = []
    for one in (paper_figures(result, arm.name) for arm in result.arms):
        speeds = [ratios.get(name) for ratios in (one.tpot_ratios, one.call_ratios)
                  for name in BASELINES]  # fmt: skip
        rows.append(
            [
                one.arm,
                number_text(one.tau, ".2f"),
                number_text(one.tau_of_texts, ".2f"),
                number_text(one.depth_share, ".1%"),
                number_text(one.draft_share, ".1%"),
                number_text(one.tokens_per_s, ".1f"),
                number_text(one.tokens_per_s_std, ".1f"),
                *(None if speed is None else f"{speed:.2f}x" for speed in speeds),
            ]
        )
    return Table(title="By the papers' definitions", columns=PAPERS, rows=rows)


def engine_tables(result: Result) -> list[Table]:
    """A row for each engine, of whole calls; no table without engines."""
    if not result.engines:
        return []
    rates = {arm.name: rate(tally_arm(result, arm.name, "total")) or 0.0 for arm in result.arms}
    ours = [arm.name for arm in result.arms if arm.kind != "peer"]
    here = max(ours, key=lambda name: rates[name])
    table = Table(
        title="beside other engines, whole calls",
        columns=ENGINES,
        rows=[_engine_cells(result, engine.name, here, rates) for engine in result.engines],
    )
    return [table]


def _engine_cells(result: Result, engine: str, here: str, rates: Mapping[str, float]) -> Row:
    names = [arm.name for arm in result.arms if arm.engine == engine]
    plain = next((name for name in names if name == f"{engine}:{PLAIN}"), None)
    best = max(names, key=lambda name: rates[name], default=None)
    versions = next(one.versions for one in result.engines if one.name == engine)
    return [
        " ".join([engine, *list(versions.values())[:1]]),
        number_text(None if plain is None else rates[plain], ".1f"),
        *with_interval(None if plain is None else compare_arms(result, PLAIN, plain, "total")),
        best,
        number_text(None if best is None else rates[best], ".1f"),
        here,
        *with_interval(None if best is None else compare_arms(result, here, best, "total")),
    ]


def drafter_tables(figures: ResultFigures) -> list[Table]:
    """Updates while serving, SpecBlock's ablations and DFlash's block sizes, if they were run."""
    result = figures.result
    tables = (
        *_update_tables(figures),
        _family_table(
            figures, ablations(result), "SpecBlock's ablations",
            ("lacks", "over the whole drafter"), lambda one: ", ".join(one.without) or "nothing",
        ),
        _family_table(
            figures, block_sizes(result), "DFlash's block sizes and BlockPilot",
            ("block", "over BlockPilot"), lambda one: f"{one.block_size or 'by prompt'}",
        ),
    )  # fmt: skip
    return [table for table in tables if table.rows]


def _update_tables(figures: ResultFigures) -> tuple[Table, Table]:
    costs, gains = [], []
    for learner in update_figures(figures.result):
        one = figures.of(learner.arm)
        counts = sorted(learner.updates.items())
        costs.append(
            [
                learner.arm,
                ", ".join(f"{count} {name}" for name, count in counts) or "none",
                f"{learner.rollbacks}",
                f"{learner.update_s:.2f}",
                f"{learner.update_share:.1%}",
                number_text(one.tokens_per_s, ".1f"),
                *with_interval(one.over_plain),
                number_text(one.end_to_end_tokens_per_s, ".1f"),
                *with_interval(one.over_plain_end_to_end),
            ]
        )
        if learner.fixed is not None:
            gains.append(
                [
                    learner.arm,
                    learner.fixed,
                    *with_interval(learner.over_fixed, learner.end_to_end_over_fixed),
                    number_text(one.tokens_per_verification, ".2f"),
                    number_text(figures.of(learner.fixed).tokens_per_verification, ".2f"),
                ]
            )
    return (
        Table(title="Updates while serving", columns=UPDATES, rows=costs),
        Table(title="What the updates gained", columns=GAINS, rows=gains),
    )


def _family_table(
    figures: ResultFigures,
    families: Sequence[Family],
    title: str,
    columns: tuple[str, str],
    difference: Callable[[FamilyArm], str],
) -> Table:
    """One row for each arm; `difference` tells its drafter from the others of the family."""
    first, base = columns
    members = [member for family in families for member in family.members]
    return Table(
        title=title,
        columns=("arm", first, "tokens/verification", "tokens/s", "over plain", INTERVAL, base,
                 INTERVAL),
        rows=[
            [
                member.arm,
                difference(member),
                number_text(one.tokens_per_verification, ".2f"),
                number_text(one.tokens_per_s, ".1f"),
                *with_interval(one.over_plain, member.over_base),
            ]
            for member in members
            for one in [figures.of(member.arm)]
        ],
    )  # fmt: skip


def hindsight_table(sweep: Hindsight) -> Table:
    """Arms with one drafter against its fixed sizes that were best in hindsight."""
    return Table(
        title=f"Against sizes chosen in hindsight (best single size: {sweep.single_best}, "
        f"{sweep.single_tokens_per_s:.1f} tokens/s)",
        columns=(
            "arm", "best single size", INTERVAL, "best of each set", INTERVAL,
            "best of each prompt", INTERVAL, "than the single one",
        ),
        rows=[
            [
                ratios.arm,
                *with_interval(ratios.single, ratios.per_set, ratios.per_prompt),
                None if ratios.single is None else ratios.single.verdict,
            ]
            for ratios in sweep.against
        ],
    )  # fmt: skip
