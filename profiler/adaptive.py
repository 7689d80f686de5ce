"""Which forwards to measure next, and when enough of them are known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from costmodel.chooser import Candidates, PointChooser
from costmodel.fit import ErrorSummary, regret_at_contexts
from costmodel.physical import fit_physical
from costmodel.points import Points
from costmodel.roofline import Roofline
from costmodel.stairs import fit_stairs
from profiler.plan import SweepPlan
from profiler.sections import points_of
from profiler.sweep import SweepResult
from profiler.workload import Task

FIRST_POINTS = 12
STEP_POINTS = 6
LEAST_POINTS = 24  # fewer can meet the goal by luck
GOAL_MEDIAN_ERROR = 0.01
GOAL_WORST_ERROR = 0.05
GOAL_WORST_REGRET = 0.01


class AdaptiveGrid:
    """The grid of a plan, measured point by point as far as the held-out points ask for it."""

    def __init__(
        self, plan: SweepPlan, roofline: Roofline, fits: Callable[[Task], bool] = lambda task: True
    ) -> None:
        """fits: leaves out points that the memory has no room for."""
        self._grid = [task for task in plan.grid() if fits(task)]
        self._roofline = roofline
        self._chooser = PointChooser(
            Candidates(
                rows=[task.size for task in self._grid],
                context=[task.context for task in self._grid],
                batch=[task.batch for task in self._grid],
            ),
            roofline,
        )

    def first(self) -> list[Task]:
        """Points that fill the space, chosen before anything is measured."""
        return [self._grid[index] for index in self._chooser.first(FIRST_POINTS)]

    def more(self, swept: SweepResult) -> list[Task] | None:
        """Further points, given what was measured: none left is [], none needed is None."""
        points = points_of(swept, "verify")
        if len(points) >= LEAST_POINTS and self._good_enough(points, swept):
            return None
        chosen = [self._grid[index] for index in self._chooser.next(points, STEP_POINTS)]
        return [task for task in chosen if task not in swept.skipped]

    def _good_enough(self, points: Points, swept: SweepResult) -> bool:
        """Whether held-out points are predicted as well as anybody needs."""
        held_out = points_of(swept, "held_out")
        if len(held_out) == 0:
            return False
        calibration = fit_stairs(points, fit_physical(points, self._roofline))
        predicted_s = calibration.predict_s(held_out.rows, held_out.context, held_out.batch)
        error = ErrorSummary.of(predicted_s, held_out.seconds)
        regret = regret_at_contexts(held_out, predicted_s)
        noise = float(np.median(held_out.median_error))
        return (
            error.median <= max(GOAL_MEDIAN_ERROR, noise)
            and error.worst <= GOAL_WORST_ERROR
            and (regret is None or regret.worst <= GOAL_WORST_REGRET)
        )
