"""BASTION's two budget rules, as released and as printed, over their own calibrations."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from costmodel.profile.profile import Profile
from decoder.policies.base import DEFAULT_MAX_NODES, Cost, FindCost, Limits, Policy
from decoder.tree.draft_tree import Candidates, DraftTree, best_first, committed_by_size
from lab.papers.bastion.two_branch import TwoBranchCalibration, fit_released

PAPER_ROWS = 32  # the least rows of the released rule's trees, and the step by which they grow


class PaperBastion(Policy):
    """BASTION as its authors released it (github.com/kaist-ai-osi-lab/BASTION, tree_draft.py).

    Over the two-branch calibration, with uncorrected path scores: nodes are added while the
    estimated speed rises, but never fewer than 32 rows (the root is one of them); what stands
    then is cut to a multiple of 32 rows. It always drafts.
    """

    name = "bastion:paper"

    def __init__(self, cost: Cost, max_nodes: int = DEFAULT_MAX_NODES) -> None:
        self.cost = cost
        self.max_nodes = max_nodes

    def choose(self, candidates: Candidates, context: int, limits: Limits) -> DraftTree:
        tree = best_first(candidates, min(self.max_nodes, limits.nodes))
        speed = _speeds(tree, self.cost, context)
        # The released test stops at equal speed too.
        stops = np.flatnonzero(np.diff(speed[PAPER_ROWS - 1 :]) <= 0.0)
        rows = PAPER_ROWS + int(stops[0]) if len(stops) else tree.rows
        return tree.first(max(rows // PAPER_ROWS * PAPER_ROWS, min(PAPER_ROWS, tree.rows)) - 1)


class PrintedBastion(Policy):
    """BASTION as printed: nodes are added until the estimated speed drops for the first time.

    Algorithm 1 with uncorrected path scores, over the single line of section 2.4. It always
    drafts.
    """

    name = "bastion:printed"

    def __init__(self, cost: Cost, max_nodes: int = DEFAULT_MAX_NODES) -> None:
        self.cost = cost
        self.max_nodes = max_nodes

    def choose(self, candidates: Candidates, context: int, limits: Limits) -> DraftTree:
        tree = best_first(candidates, min(self.max_nodes, limits.nodes))
        drops = np.flatnonzero(np.diff(_speeds(tree, self.cost, context)) < 0.0)
        return tree.first(int(drops[0]) if len(drops) else tree.nodes)


def _speeds(tree: DraftTree, cost: Cost, context: int) -> NDArray[np.float64]:
    """[rows] A(N) / C(N) of the tree's first N = 0, 1, ... nodes."""
    sizes = np.arange(tree.nodes + 1, dtype=np.float64)
    speeds: NDArray[np.float64] = committed_by_size(tree.scores) / cost.cycle_s(sizes, context)
    return speeds


def released_calibration(profile: Profile) -> TwoBranchCalibration:
    """The calibration of the paper's public code, fitted to what the selected one predicts.

    That code measures a grid of its own; the selected calibration gives its times.
    """
    return fit_released(profile.verify_calibration(), profile.roofline())


def paper(cost: FindCost, max_nodes: int) -> PaperBastion:
    """`bastion:paper`"""
    return PaperBastion(cost(released_calibration), max_nodes)


def printed(cost: FindCost, max_nodes: int) -> PrintedBastion:
    """`bastion:printed`"""
    return PrintedBastion(cost(Profile.linear_calibration), max_nodes)
