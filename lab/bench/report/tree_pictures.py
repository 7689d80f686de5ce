"""Pictures of draft trees: committed lengths, path scores against them, and chosen sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lab.bench.analysis.figures import LEAST_ROUNDS
from lab.bench.analysis.round_groups import (
    score_bins,
    score_cells,
    size_shares,
    sizes_by_context,
)
from lab.bench.analysis.summary import ResultFigures
from lab.bench.record import Arm
from lab.bench.report.drawing import colour_of, grouped_bars, swept_pictures
from profiler.report.drawing import (
    GRAY,
    SERIES,
    Picture,
    finish,
    new_plot,
    shown,
    slug,
    tree_size_axis,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_LINES = 8  # arms in one picture
MOST_ARMS = 4  # with a picture of path scores each
CELL = 0.5  # tokens of predicted length
_MARKS = "os^Dvp<>"
_NO_TREES = "no arm of this run told of its rounds; add --policy bastion"


def length_pictures(figures: ResultFigures) -> list[Picture]:
    """Figure 2 (left) of the BASTION paper, acceptance by depth, and committed lengths."""
    if not figures.speculating:
        return [*_swept(figures), Picture(name="accepted", title="Acceptance", missing=_NO_TREES)]
    return [
        *_swept(figures),
        _depths(figures, figures.main[:MOST_LINES]),
        Picture(
            name="committed",
            title="Tokens per verification",
            caption="Share of the rounds with a tree by the tokens they committed: the accepted "
            "levels and the bonus token, those behind the end of a text included.",
            draw=lambda: _draw_committed(figures, figures.main[:MOST_LINES]),
        ),
    ]


def _swept(figures: ResultFigures) -> list[Picture]:
    return swept_pictures(
        figures,
        "length",
        ("Committed length against tree size", "(figure 2, left)"),
        "Solid: tokens committed by a round with a tree, its bonus token counted, "
        "mean over all rounds of all prompts. Dashed: predicted by the path scores of the "
        "same trees.",
        _draw_length,
    )


def _depths(figures: ResultFigures, arms: Sequence[Arm]) -> Picture:
    title = "Acceptance by depth"
    every = [one for arm in arms for one in figures.of(arm.name).depths]
    if not any(one.reached >= LEAST_ROUNDS for one in every):
        return Picture(name="depth", title=title,
                       missing=f"no depth was reached by {LEAST_ROUNDS} rounds; give more "
                       "--prompts or --new-tokens")  # fmt: skip
    return Picture(
        name="depth",
        title=title,
        caption="Of the rounds whose tree goes to this depth and that accepted every level "
        "above, the share that accepted this level too. Depths that fewer than "
        f"{LEAST_ROUNDS} rounds reached are left out.",
        draw=lambda: _draw_depths(figures, arms),
    )


def score_pictures(figures: ResultFigures) -> list[Picture]:
    """Figure 6 of the BASTION paper: predicted against realised lengths, pooled and by depth."""
    if not figures.speculating:
        return [Picture(name="scores", title="Path scores (figure 6)", missing=_NO_TREES)]
    arms = [*figures.with_policy("chain"), *figures.with_policy("bastion")] or figures.main
    pictures = []
    for number, arm in enumerate(arms[:MOST_ARMS]):
        if figures.of(arm.name).path_scores is None:
            continue
        pictures.append(
            Picture(
                name=f"scores-{number + 1}-{slug(arm.name)}",
                title=f"Path scores of {arm.name} (figure 6)",
                caption="Each circle: rounds with a tree, by committed length as the sum of path "
                "scores predicted it (in steps of half a token) and as it came out; its area grows "
                "with their number. Line: means of groups of equally many rounds. On the dotted "
                "line prediction and outcome agree. Both lengths count the bonus token.",
                draw=lambda arm=arm: _draw_scores(figures, arm),
            )
        )
    pictures.append(
        Picture(
            name="reliability",
            title="Reliability of path scores by depth",
            caption="Each mark is one depth of the tree, the first on the right: the share of "
            "rounds expected to accept so deep, and the share that did. Above the dotted line "
            "the drafter was too modest, below it too sure.",
            draw=lambda: _draw_reliability(figures, figures.main[:MOST_LINES]),
        )
    )
    return pictures


def choice_pictures(figures: ResultFigures) -> list[Picture]:
    """The tree sizes that adaptive policies chose, overall and by context."""
    rules = ("bastion", "bastion:paper", "bastion:printed")
    adaptive = [arm for rule in rules for arm in figures.with_policy(rule)]
    arms = (adaptive or [arm for arm in figures.main if arm.policy != "chain"])[:MOST_LINES]
    if not arms:
        return [Picture(name="chosen", title="Chosen tree sizes", missing="add --policy bastion")]
    return [
        Picture(
            name="chosen",
            title="Chosen tree sizes",
            caption="Share of all rounds by nodes of the tree that was verified; at 0 are rounds "
            "without a draft.",
            draw=lambda: _draw_chosen(figures, arms),
        ),
        Picture(
            name="chosen-context",
            title="Chosen tree sizes as the text grows",
            caption="Median and quartiles of the nodes verified, over groups of equally many "
            "rounds by cached tokens.",
            draw=lambda: _draw_by_context(figures, arms),
        ),
    ]


def _draw_length(figures: ResultFigures, drafter: str) -> Figure:
    plot, axes = new_plot()
    swept = [size for size in figures.hindsight[drafter].sizes if size.nodes > 0]
    points = [(size.nodes, scores) for size in swept
             if (scores := figures.of(size.arm).path_scores) is not None]  # fmt: skip
    colour = colour_of("fixed")
    sizes = [nodes for nodes, _ in points]
    axes.plot(sizes, [one.realised_mean for _, one in points], "o-", color=colour, markersize=4,
              label="fixed size, measured")  # fmt: skip
    axes.plot(sizes, [one.predicted_mean for _, one in points], "s--", color=colour, markersize=4,
              markerfacecolor="none", linewidth=1, label="fixed size, predicted")  # fmt: skip
    for arm in figures.with_drafter(drafter):
        one = figures.of(arm.name)
        if arm.nodes is None and not arm.variant and one.path_scores is not None:
            axes.plot([one.nodes_mean], [one.path_scores.realised_mean], "*", markersize=11,
                      color=colour_of(arm.policy), label=shown(arm.policy))  # fmt: skip
    tree_size_axis(axes, [0, *sizes])
    axes.set_ylim(bottom=0)
    return finish(plot, axes, ("nodes of the draft tree", "tokens committed by a round"), columns=2)


def _draw_depths(figures: ResultFigures, arms: Sequence[Arm]) -> Figure:
    plot, axes = new_plot()
    for number, arm in enumerate(arms):
        depths = [one for one in figures.of(arm.name).depths if one.reached >= LEAST_ROUNDS]
        axes.plot([one.depth for one in depths], [one.accepted / one.reached for one in depths],
                  marker=_MARKS[number], markersize=4, color=SERIES[number],
                  label=shown(arm.name))  # fmt: skip
    axes.set_ylim(0, 1.02)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return finish(
        plot, axes, ("depth in the tree", "accepted, of those that came so far"), columns=2
    )


def _draw_committed(figures: ResultFigures, arms: Sequence[Arm]) -> Figure:
    plot, axes = new_plot()
    groups = []
    for arm in arms:
        counts = figures.of(arm.name).accepted_rounds
        shares = [count / (sum(counts) or 1) for count in counts]
        groups.append((arm.name, range(1, len(counts) + 1), shares))
    grouped_bars(axes, groups)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return finish(
        plot, axes, ("tokens committed by a round", "share of rounds with a tree"), columns=2
    )


def _draw_scores(figures: ResultFigures, arm: Arm) -> Figure:
    plot, axes = new_plot()
    table, scores = figures.rounds(arm.name), figures.of(arm.name).path_scores
    if table is None or scores is None:
        return plot
    cells, colour = score_cells(table, CELL), colour_of(arm.policy)
    most = max(cells.values())
    axes.scatter([at for at, _ in cells], [length for _, length in cells],
                 s=[220 * count / most for count in cells.values()], color=colour, alpha=0.35,
                 linewidths=0)  # fmt: skip
    groups = score_bins(table)
    axes.plot([one.predicted for one in groups], [one.realised for one in groups], "o-",
              color="black", markersize=3.5, linewidth=1.2)  # fmt: skip
    right, top = (max(values) + 0.7 for values in zip(*cells, strict=True))
    axes.plot([0.5, right], [0.5, right], ":", color=GRAY, linewidth=1)
    axes.set_xlim(0.5, right)
    axes.set_ylim(0.3, top)
    axes.yaxis.get_major_locator().set_params(integer=True)
    correlation = ", ".join(
        f"{name} {value:.2f}"
        for name, value in (("Pearson", scores.pearson), ("Spearman", scores.spearman))
        if value is not None
    )
    axes.set_title(f"{correlation or 'too few rounds to correlate'}; {scores.rounds} rounds",
                   fontsize=9, loc="left")  # fmt: skip
    return finish(plot, axes, ("predicted tokens", "committed tokens"))


def _draw_reliability(figures: ResultFigures, arms: Sequence[Arm]) -> Figure:
    plot, axes = new_plot()
    axes.plot([0, 1], [0, 1], ":", color=GRAY, linewidth=1)
    for number, arm in enumerate(arms):
        depths = figures.of(arm.name).depths
        axes.plot([one.predicted / one.rounds for one in depths],
                  [one.realised / one.rounds for one in depths], marker=_MARKS[number],
                  markersize=4.5, linewidth=1, color=SERIES[number],
                  label=shown(arm.name))  # fmt: skip
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    return finish(plot, axes, ("share predicted to accept so deep", "share that did"), columns=2)


def _draw_chosen(figures: ResultFigures, arms: Sequence[Arm]) -> Figure:
    plot, axes = new_plot()
    shares = {
        arm.name: size_shares(table)
        for arm in arms
        if (table := figures.rounds(arm.name)) is not None
    }
    sizes = sorted({size for by_size in shares.values() for size in by_size})
    grouped_bars(axes, [
        (name, [sizes.index(size) for size in by_size], list(by_size.values()))
        for name, by_size in shares.items()
    ])  # fmt: skip
    axes.set_xticks(
        range(len(sizes)),
        [str(low) if low == high else f"{low}\N{EN DASH}{high}" for low, high in sizes],
    )
    return finish(plot, axes, ("nodes of the tree", "share of rounds"), columns=2)


def _draw_by_context(figures: ResultFigures, arms: Sequence[Arm]) -> Figure:
    plot, axes = new_plot()
    for number, arm in enumerate(arms):
        table = figures.rounds(arm.name)
        bands = [] if table is None else sizes_by_context(table)
        contexts, colour = [band.context for band in bands], SERIES[number]
        axes.fill_between(contexts, [band.low for band in bands], [band.high for band in bands],
                          color=colour, alpha=0.2, linewidth=0)  # fmt: skip
        axes.plot(contexts, [band.middle for band in bands], marker=_MARKS[number], markersize=4,
                  color=colour, label=shown(arm.name))  # fmt: skip
    axes.set_ylim(bottom=0)
    return finish(plot, axes, ("cached tokens", "nodes of the tree"), columns=2)
