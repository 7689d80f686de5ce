"""BASTION's two budget rules, as released and as printed, over their own calibrations."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from pydantic import model_validator

from costmodel.calibration.points import Calibration, RooflineCalibration
from costmodel.fields import Factor, SecondsOrZero
from costmodel.profile.profile import Profile
from costmodel.roofline import Roofline
from costmodel.statistics import Array
from decoder.policies.base import DEFAULT_MAX_NODES, Cost, FindCost, Limits, Policy
from decoder.tree.draft_tree import Candidates, DraftTree, best_first

PAPER_ROWS = 32  # the least rows of the released rule's trees, and the step by which they grow


class _Growing(Policy):
    """One of the two rules, over a cost; both always draft."""

    acceptance = "walk"

    def __init__(self, cost: Cost, max_nodes: int = DEFAULT_MAX_NODES) -> None:
        self.cost, self.max_nodes = cost, max_nodes


class PaperBastion(_Growing):
    """BASTION as its authors released it (github.com/kaist-ai-osi-lab/BASTION, tree_draft.py).

    Over the two-branch calibration, with uncorrected path scores: nodes are added while the
    estimated speed rises, but never fewer than 32 rows (the root is one of them); what stands
    then is cut to a multiple of 32 rows. That code takes the best 128 tokens of
    a position and at most 8,192 nodes; here both limits are `max_nodes`.
    """

    name = "bastion:paper"

    def choose(self, candidates: Candidates, context: int, limits: Limits) -> DraftTree:
        tree = best_first(candidates, min(self.max_nodes, limits.nodes))
        speed = _speeds(tree, self.cost, context)
        # The released test stops at equal speed too.
        stops = np.flatnonzero(np.diff(speed[PAPER_ROWS - 1 :]) <= 0.0)
        rows = PAPER_ROWS + int(stops[0]) if len(stops) else tree.rows
        return tree.first(max(rows // PAPER_ROWS * PAPER_ROWS, min(PAPER_ROWS, tree.rows)) - 1)


class PrintedBastion(_Growing):
    """BASTION as printed: nodes are added while the estimated speed rises.

    Algorithm 1 with uncorrected path scores, over the single line of section 2.4. The first node
    is always taken, and equal speed stops the growth.
    """

    name = "bastion:printed"

    def choose(self, candidates: Candidates, context: int, limits: Limits) -> DraftTree:
        tree = best_first(candidates, min(self.max_nodes, limits.nodes))
        stops = np.flatnonzero(np.diff(_speeds(tree, self.cost, context)[1:]) <= 0.0)
        return tree.first(1 + int(stops[0]) if len(stops) else tree.nodes)


def _speeds(tree: DraftTree, cost: Cost, context: int) -> Array:
    """[rows] A(N) / C(N) of the tree's first N = 0, 1, ... nodes."""
    sizes = np.arange(tree.nodes + 1, dtype=np.float64)
    committed = 1.0 + np.concatenate((np.zeros(1), tree.scores.cumsum()))
    speeds: Array = committed / cost.cycle_s(sizes, context)
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


# The calibration of BASTION's public code (cost_model.py): its grid and its weights.
RELEASED_ROWS = tuple(range(16, 513, 16))
RELEASED_CONTEXTS = (64, 128, 256, 512, 1024, 2048)
RELEASED_SIGMA = 30.0


class TwoBranchCalibration(RooflineCalibration):
    """seconds = max(memory slope x bytes side + floor, compute slope x FLOPs side + floor).

    The two sides are those of the paper's roofline, in seconds.
    """

    memory_slope: Factor
    memory_floor_s: SecondsOrZero
    compute_slope: Factor
    compute_floor_s: SecondsOrZero

    @model_validator(mode="after")
    def _check(self) -> TwoBranchCalibration:
        slopes, floors_s = (
            (self.memory_slope, self.compute_slope),
            (self.memory_floor_s, self.compute_floor_s),
        )
        if not max(*slopes, *floors_s) > 0:
            raise ValueError("at least one of the coefficients must be above 0")
        return self

    def over(self, roofline: Roofline) -> TwoBranchCalibration:
        """The same coefficients over the paper's count of this roofline."""
        return super().over(roofline.with_count("paper"))

    def predict_s(self, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1) -> Array:
        """Seconds in the broadcast shape of the arguments, never below the physical bound."""
        compute_s, memory_s = self.roofline.branches_s(rows, context, batch)
        slower = np.maximum(
            self.memory_slope * memory_s + self.memory_floor_s,
            self.compute_slope * compute_s + self.compute_floor_s,
        )
        return self.roofline.bounded(slower, rows, context, batch)


def fit_released(forward: Calibration, roofline: Roofline) -> TwoBranchCalibration:
    """Both lines as BASTION's public code fits them, to the forward's times on that code's grid.

    Least squares of seconds from slopes of 1 and floors of 0, all four not negative, with a
    standard deviation that grows 31-fold from the fewest rows to the most.
    """
    from scipy.optimize import curve_fit  # late: reading a profile must not import it

    rows, context = (axis.ravel() for axis in np.meshgrid(RELEASED_ROWS, RELEASED_CONTEXTS))
    compute_s, memory_s = roofline.with_count("paper").branches_s(rows, context)

    def slower(_: Array, memory: float, memory_floor: float, compute: float, floor: float) -> Array:
        fitted: Array = np.maximum(memory * memory_s + memory_floor, compute * compute_s + floor)
        return fitted

    sigma = 1.0 + RELEASED_SIGMA * (rows - rows.min()) / np.ptp(rows)
    lines, _ = curve_fit(
        slower,
        np.arange(len(rows)),
        forward.predict_s(rows, context),
        p0=(1.0, 0.0, 1.0, 0.0),
        bounds=(0.0, np.inf),
        sigma=sigma / sigma.mean(),
        maxfev=5000,
    )
    memory_slope, memory_floor_s, compute_slope, compute_floor_s = (float(line) for line in lines)
    calibration = TwoBranchCalibration(
        memory_slope=memory_slope,
        memory_floor_s=memory_floor_s,
        compute_slope=compute_slope,
        compute_floor_s=compute_floor_s,
    )
    return calibration.over(roofline)
