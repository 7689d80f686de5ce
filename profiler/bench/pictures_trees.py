"""Pictures of draft trees: how long the committed texts are, what was foretold, what was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from profiler.bench.drawing import (
    GRAY,
    SERIES,
    Picture,
    colour_of,
    legend_below,
    name_axes,
    new_figure,
    shown,
    slug,
    tree_size_axis,
)
from profiler.bench.figures import LEAST_ROUNDS
from profiler.bench.record import Arm
from profiler.bench.series import score_bins, score_cells, size_shares, sizes_by_context
from profiler.bench.view import View

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_LINES = 8
MOST_ARMS = 3  # that get a picture each
CELL = 0.5  # tokens, of the predicted length
_MARKS = "os^Dvp<>"
_NO_TREES = "no arm of this run told of its rounds; add --policy bastion"


def length_pictures(view: View) -> list[Picture]:
    """Figure 2 (left) of the paper, and how the accepted lengths are spread."""
    if not view.speculating:
        return [*_swept(view), Picture(name="accepted", title="Acceptance", missing=_NO_TREES)]
    return [
        *_swept(view),
        _depths(view, view.main[:MOST_LINES]),
        Picture(
            name="committed",
            title="Tokens per verification",
            caption="Share of the rounds with a tree by the tokens they committed: the accepted "
            "levels and the bonus token, those behind the end of a text included.",
            draw=lambda: _draw_committed(view, view.main[:MOST_LINES]),
        ),
    ]


def _swept(view: View) -> list[Picture]:
    """Committed length by fixed tree size, one picture a drafter."""
    title = "Committed length against tree size"
    if not view.hindsight:
        return [Picture(name="length", title=f"{title} (figure 2, left)",
                        missing="add --study sweep for fixed tree sizes")]  # fmt: skip
    return [
        Picture(
            name=f"length-{number + 1}-{slug(drafter)}",
            title=f"{title} with {drafter} (figure 2, left)",
            caption="Solid: tokens committed by a round with a tree, its bonus token counted, "
            "mean over all rounds of all prompts. Dashed: what the path scores of the same "
            "trees foretold.",
            draw=lambda drafter=drafter: _draw_length(view, drafter),
        )
        for number, drafter in enumerate(view.hindsight)
    ]


def _depths(view: View, arms: Sequence[Arm]) -> Picture:
    title = "Acceptance by depth"
    every = [one for arm in arms for one in view.figures(arm.name).depths]
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
        draw=lambda: _draw_depths(view, arms),
    )


def score_pictures(view: View) -> list[Picture]:
    """Figure 6 of the paper: predicted against realised length, and whether depths keep faith."""
    if not view.speculating:
        return [Picture(name="scores", title="Path scores (figure 6)", missing=_NO_TREES)]
    arms = [*view.named("chain"), *view.named("bastion")] or view.main
    pictures = []
    for number, arm in enumerate(arms[: MOST_ARMS + 1]):
        if view.figures(arm.name).path_scores is None:
            continue
        pictures.append(
            Picture(
                name=f"scores-{number + 1}-{slug(arm.name)}",
                title=f"Path scores of {arm.name} (figure 6)",
                caption="Each circle: rounds with a tree, by committed length as the sum of path "
                "scores foretold it (in steps of half a token) and as it came out; its area grows "
                "with their number. Line: means of groups of equally many rounds. On the dotted "
                "line prediction and outcome agree. Both lengths count the bonus token.",
                draw=lambda arm=arm: _draw_scores(view, arm),
            )
        )
    pictures.append(
        Picture(
            name="reliability",
            title="Reliability of path scores by depth",
            caption="Each mark is one depth of the tree, the first on the right: the share of "
            "rounds expected to accept so deep, and the share that did. Above the dotted line "
            "the drafter was too modest, below it too sure.",
            draw=lambda: _draw_reliability(view, view.main[:MOST_LINES]),
        )
    )
    return pictures


def choice_pictures(view: View) -> list[Picture]:
    """The sizes that adaptive policies chose."""
    adaptive = [*view.named("bastion"), *view.named("bastion:paper")]
    arms = (adaptive or [arm for arm in view.main if arm.policy != "chain"])[:MOST_LINES]
    if not arms:
        return [Picture(name="chosen", title="Chosen tree sizes", missing="add --policy bastion")]
    return [
        Picture(
            name="chosen",
            title="Chosen tree sizes",
            caption="Share of all rounds by nodes of the tree that was verified; at 0 are rounds "
            "without a draft.",
            draw=lambda: _draw_chosen(view, arms),
        ),
        Picture(
            name="chosen-context",
            title="Chosen tree sizes as the text grows",
            caption="Median and quartiles of the nodes verified, over groups of equally many "
            "rounds by cached tokens.",
            draw=lambda: _draw_by_context(view, arms),
        ),
    ]


def _draw_length(view: View, drafter: str) -> Figure:
    figure, axes = new_figure()
    swept = [size for size in view.hindsight[drafter].sizes if size.nodes > 0]
    known = [(size.nodes, scores) for size in swept
             if (scores := view.figures(size.arm).path_scores) is not None]  # fmt: skip
    colour = colour_of("fixed")
    sizes = [nodes for nodes, _ in known]
    axes.plot(sizes, [own.realised_mean for _, own in known], "o-", color=colour, markersize=4,
              label="fixed size, measured")  # fmt: skip
    axes.plot(sizes, [own.predicted_mean for _, own in known], "s--", color=colour, markersize=4,
              markerfacecolor="none", linewidth=1, label="fixed size, foretold")  # fmt: skip
    for arm in view.with_drafter(drafter):
        own = view.figures(arm.name)
        if arm.nodes is None and not arm.variant and own.path_scores is not None:
            axes.plot([own.nodes_mean], [own.path_scores.realised_mean], "*", markersize=11,
                      color=colour_of(arm.policy), label=shown(arm.policy))  # fmt: skip
    tree_size_axis(axes, [0, *sizes])
    axes.set_ylim(bottom=0)
    name_axes(axes, "nodes of the draft tree", "tokens committed by a round")
    legend_below(figure, axes, columns=2)
    return figure


def _draw_depths(view: View, arms: Sequence[Arm]) -> Figure:
    figure, axes = new_figure()
    for number, arm in enumerate(arms):
        own = [one for one in view.figures(arm.name).depths if one.reached >= LEAST_ROUNDS]
        axes.plot([one.depth for one in own], [one.accepted / one.reached for one in own],
                  marker=_MARKS[number], markersize=4, color=SERIES[number],
                  label=shown(arm.name))  # fmt: skip
    axes.set_ylim(0, 1.02)
    axes.xaxis.get_major_locator().set_params(integer=True)
    name_axes(axes, "depth in the tree", "accepted, of those that came so far")
    legend_below(figure, axes, columns=2)
    return figure


def _draw_committed(view: View, arms: Sequence[Arm]) -> Figure:
    figure, axes = new_figure()
    width = 0.8 / max(len(arms), 1)
    for number, arm in enumerate(arms):
        counts = view.figures(arm.name).accepted_rounds
        shift = (number - (len(arms) - 1) / 2) * width
        total = sum(counts) or 1
        axes.bar([tokens + shift for tokens in range(1, len(counts) + 1)],
                 [count / total for count in counts], width, color=SERIES[number],
                 label=shown(arm.name))  # fmt: skip
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(False, axis="x")
    name_axes(axes, "tokens committed by a round", "share of rounds with a tree")
    legend_below(figure, axes, columns=2)
    return figure


def _draw_scores(view: View, arm: Arm) -> Figure:
    figure, axes = new_figure()
    table, own = view.rounds(arm.name), view.figures(arm.name).path_scores
    if table is None or own is None:
        return figure
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
        for name, value in (("Pearson", own.pearson), ("Spearman", own.spearman))
        if value is not None
    )
    axes.set_title(f"{correlation or 'too few rounds to correlate'}; {own.rounds} rounds",
                   fontsize=9, loc="left")  # fmt: skip
    name_axes(axes, "foretold tokens", "committed tokens")
    return figure


def _draw_reliability(view: View, arms: Sequence[Arm]) -> Figure:
    figure, axes = new_figure()
    axes.plot([0, 1], [0, 1], ":", color=GRAY, linewidth=1)
    for number, arm in enumerate(arms):
        own = view.figures(arm.name).depths
        axes.plot([one.predicted / one.rounds for one in own],
                  [one.realised / one.rounds for one in own], marker=_MARKS[number],
                  markersize=4.5, linewidth=1, color=SERIES[number],
                  label=shown(arm.name))  # fmt: skip
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    name_axes(axes, "share foretold to accept so deep", "share that did")
    legend_below(figure, axes, columns=2)
    return figure


def _draw_chosen(view: View, arms: Sequence[Arm]) -> Figure:
    figure, axes = new_figure()
    tables = [(arm, table) for arm in arms if (table := view.rounds(arm.name)) is not None]
    sizes = sorted({size for _, table in tables for size in size_shares(table)})
    width = 0.8 / max(len(tables), 1)
    for number, (arm, table) in enumerate(tables):
        shift = (number - (len(tables) - 1) / 2) * width
        shares = size_shares(table)
        axes.bar([sizes.index(size) + shift for size in shares], list(shares.values()), width,
                 color=SERIES[number], label=shown(arm.name))  # fmt: skip
    axes.set_xticks(
        range(len(sizes)),
        [str(low) if low == high else f"{low}\N{EN DASH}{high}" for low, high in sizes],
    )
    axes.grid(False, axis="x")
    name_axes(axes, "nodes of the tree", "share of rounds")
    legend_below(figure, axes, columns=2)
    return figure


def _draw_by_context(view: View, arms: Sequence[Arm]) -> Figure:
    figure, axes = new_figure()
    for number, arm in enumerate(arms):
        table = view.rounds(arm.name)
        bands = [] if table is None else sizes_by_context(table)
        contexts, colour = [band.context for band in bands], SERIES[number]
        axes.fill_between(contexts, [band.low for band in bands], [band.high for band in bands],
                          color=colour, alpha=0.2, linewidth=0)  # fmt: skip
        axes.plot(contexts, [band.middle for band in bands], marker=_MARKS[number], markersize=4,
                  color=colour, label=shown(arm.name))  # fmt: skip
    axes.set_ylim(bottom=0)
    name_axes(axes, "cached tokens", "nodes of the tree")
    legend_below(figure, axes, columns=2)
    return figure
