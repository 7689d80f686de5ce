"""Figures 7 and 8a of the BASTION paper.

    python -m lab.studies.bastion_figures 7.png A100.json H100.json
    python -m lab.studies.bastion_figures 8a.png

Figure 7 sets results of `rooftree bench` from several devices side by side: the mean over the
prompt sets of each arm's speed-up over transformers' plain decoding, by the time of a later token.
Figure 8a shows two trees of 17 rows over one simulated block, picked since its trees differ; the
accepted path is red.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from costmodel.acceptance import published
from decoder.policies.base import Limits
from decoder.tree.draft_tree import DraftTree, best_first
from lab.bench.analysis.papers import BASELINES, paper_figures
from lab.bench.record import PLAIN, Result, read_result
from lab.papers.dynatree.baselines import beam
from lab.studies.controller_simulated import accepted_rows, draw_rounds
from profiler.report.drawing import GRAY, SERIES, panels, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BEAM = "4x4"
NODES = 16


def speed_ups(result: Result) -> dict[str, float]:
    """Mean over the prompt sets of each drafting arm's ratio to a plain step.

    The baseline is transformers' where the result has it, and else our own.
    """
    names = [arm.name for arm in result.arms]
    baseline = next(name for name in BASELINES if name in names)
    return {
        arm.name: fmean(
            paper_figures(result, arm.name, prompt_set).tpot_ratios[baseline]
            for prompt_set in result.sets
        )
        for arm in result.arms
        if arm.kind == "policy" and arm.policy != PLAIN
    }


def side_by_side(results: Sequence[Result]) -> Figure:
    """Bars of `speed_ups`, a group for each result's device."""
    figure, (axes,) = panels(1)
    by_device = [speed_ups(result) for result in results]
    arms = list(dict.fromkeys(arm for speeds in by_device for arm in speeds))
    width = 0.8 / len(arms)
    for index, arm in enumerate(arms):
        places = np.arange(len(results)) + index * width
        heights = [speeds.get(arm, np.nan) for speeds in by_device]
        axes.bar(places, heights, width, label=arm, color=SERIES[index % len(SERIES)])
    axes.set_xticks(
        np.arange(len(results)) + 0.4 - width / 2, [result.environment.device for result in results]
    )
    axes.set_ylabel("times plain decoding")
    axes.legend(fontsize=7)
    return figure


def two_trees(seed: int = 2) -> tuple[dict[str, DraftTree], list[int]]:
    """The beam's tree and the best-first one over the same block, and the target's tokens."""
    process = published("bastion", "alpaca", target="qwen3-8b", temperature=0)
    ((block, truth),) = draw_rounds(process, 1, seed)
    beams = beam(BEAM).choose(block, 0, Limits(nodes=NODES, depth=len(truth)))
    return {f"beam {BEAM}": beams, "best first": best_first(block, NODES)}, truth.tolist()


def drawn_trees(seed: int = 2) -> Figure:
    """Both trees as nodes and edges, the root at the top."""
    trees, truth = two_trees(seed)
    figure, grid = panels(len(trees), columns=2)
    for axes, (name, tree) in zip(grid, trees.items(), strict=True):
        accepted = {0, *accepted_rows(tree, truth)}
        depth, across = tree.row_depths(), np.zeros(tree.rows)
        for level in range(1, int(depth.max()) + 1):  # siblings lie together, below their parents
            rows = np.flatnonzero(depth == level)
            order = rows[np.argsort(across[tree.parents[rows - 1]], kind="stable")]
            across[order] = np.arange(len(order)) - (len(order) - 1) / 2
        colours = ["red" if row in accepted else GRAY for row in range(tree.rows)]
        for row in range(1, tree.rows):
            ends = [tree.parents[row - 1], row]
            axes.plot(across[ends], -depth[ends], color=colours[row])
        axes.scatter(across, -depth, color=colours)
        axes.set_title(f"{name}: {tree.rows} rows, {len(accepted)} tokens", fontsize=9)
        axes.set_axis_off()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", type=Path)
    parser.add_argument("results", type=Path, nargs="*", help="Of `rooftree bench`, for figure 7.")
    options = parser.parse_args()
    results = [read_result(path) for path in options.results]
    print(save_figure(side_by_side(results) if results else drawn_trees(), options.picture))


if __name__ == "__main__":
    main()
