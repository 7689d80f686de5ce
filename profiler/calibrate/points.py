"""The points of a calibration: the planned ones, and further ones chosen while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodel.calibration.base import Calibration
from costmodel.calibration.design import CandidateShapes, PointDesign
from costmodel.calibration.physical import fit_physical
from costmodel.calibration.points import ErrorSummary, Points
from costmodel.calibration.selection import (
    costly_choices,
    has_choices,
    regret_at_contexts,
    select_calibration,
)
from costmodel.calibration.stairs import fit_stairs
from costmodel.roofline import Roofline
from costmodel.speculation import Regret
from profiler.calibrate.sections import points_of
from profiler.calibrate.sweep import SweepResult, Task, Uncertainty
from profiler.report.profiles import TOLERATED_REGRET

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1025)
PREFILL_TOKENS = (128, 512)
BUILD_NODES = (1, 3, 7, 15, 31, 63, 127, 255, 511, 1023)
COMMIT_TOKENS = (1, 2, 4, 8)


def verify_grid(
    rows: Sequence[int], contexts: Sequence[int], batches: Sequence[int] = (1,)
) -> list[Task]:
    """A verification of every row count at every context and batch size."""
    return [
        Task(kind="verify", size=size, context=context, batch=batch)
        for batch in batches
        for context in contexts
        for size in rows
    ]


def draw_rows(random: np.random.Generator, most: int, count: int) -> list[int]:
    """`count` log-uniform row counts from 2 to `most`, one in each stratum."""
    edges = np.linspace(np.log(2), np.log(most), count + 1)
    drawn: list[int] = np.rint(np.exp(random.uniform(edges[:-1], edges[1:]))).astype(int).tolist()
    return drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """The points that a calibration of the decoder may measure.

    buckets         row counts that the runtime pads forwards to; only these are measured.
                    Empty where the runtime does not pad
    prefill_tokens  prompt lengths; those above the largest context are left out
    plain_batches   further batch sizes at which only the plain step is measured
    """

    contexts: tuple[int, ...]
    max_nodes: int
    batches: tuple[int, ...] = (1,)
    held_out_contexts: int = 3
    held_out_rows: int = 6
    seed: int = 0
    buckets: tuple[int, ...] = ()
    prefill_tokens: tuple[int, ...] = PREFILL_TOKENS
    plain_batches: tuple[int, ...] = ()

    @property
    def rows(self) -> tuple[int, ...]:
        """Row counts of the grid, up to and including those of the largest tree."""
        most = self.padded(self.max_nodes + 1)
        return tuple(sorted({rows for rows in self.buckets or ROWS if rows <= most} | {most}))

    def padded(self, rows: int) -> int:
        """The rows that a forward of `rows` rows runs, padding included."""
        return next((size for size in self.buckets if size >= rows), rows)

    @property
    def capacity(self) -> int:
        """Tokens of a KV cache that holds every point."""
        return max(self.contexts) + self.padded(self.max_nodes + 1)

    def capacities(self) -> dict[int, int]:
        """Tokens of the KV cache for each batch size of which only the plain step is measured."""
        return {batch: max(self._plain_contexts) + 1 for batch in self._further_batches}

    @property
    def _further_batches(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.plain_batches) - set(self.batches)))

    @property
    def _plain_contexts(self) -> tuple[int, ...]:
        """The shortest and the middle context, at which many sequences still fit into memory."""
        ordered = sorted(self.contexts)
        return tuple(sorted({ordered[0], ordered[len(ordered) // 2]}))

    def grid(self) -> list[Task]:
        return verify_grid(self.rows, self.contexts, self.batches)

    def held_out(self) -> list[Task]:
        """Points that no fit uses: log-uniform contexts, each with log-uniform row counts.

        They are drawn from the seed before anything is measured, all at the smallest batch.
        Row counts are stratified, one draw a stratum. Each context also has a plain step, so
        that the decision regret can be computed there.
        """
        random = np.random.default_rng((self.seed, 7919))
        low, high = np.log(min(self.contexts)), np.log(max(self.contexts))
        batch, tasks = min(self.batches), set()
        for context in np.exp(random.uniform(low, high, self.held_out_contexts)):
            drawn = draw_rows(random, self.max_nodes + 1, self.held_out_rows)
            for rows in {1, *map(self.padded, drawn)}:
                tasks.add(Task(kind="held_out", size=rows, context=round(context), batch=batch))
        return sorted(tasks)

    def stages(self) -> list[Task]:
        """The stages of a cycle beside verification, and the prefill."""
        middle = sorted(self.contexts)[len(self.contexts) // 2]
        builds = sorted({n for n in BUILD_NODES if n <= self.max_nodes} | {self.max_nodes})
        prompts = [tokens for tokens in self.prefill_tokens if tokens <= max(self.contexts)]
        tasks = [Task(kind="prefill", size=tokens) for tokens in prompts]
        tasks += [
            Task(kind="plain", size=1, context=context, batch=batch)
            for batch in self._further_batches
            for context in self._plain_contexts
        ]
        tasks += [Task(kind="draft", size=1, context=context) for context in self.contexts]
        tasks += [Task(kind="build", size=nodes) for nodes in builds]
        for kind in ("accept", "accept_sampled"):
            tasks += [Task(kind=kind, size=nodes) for nodes in builds]
        tasks += [
            Task(kind="commit", size=tokens, context=middle)
            for tokens in COMMIT_TOKENS
            if 2 * tokens <= self.max_nodes
        ]
        return tasks


FIRST_POINTS = 12
STEP_POINTS = 6
LEAST_POINTS = 24  # fewer may meet the goals by chance
GOAL_MEDIAN_ERROR = 0.01
GOAL_WORST_ERROR = 0.05
GOAL_WORST_REGRET = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeldOutCheck:
    """Errors and decision regret at the held-out points, and the points' own noise."""

    points: Points
    predicted_s: NDArray[np.float64]
    error: ErrorSummary
    regret: Regret | None
    noise: float

    @property
    def costs_too_much(self) -> bool:
        return self.regret is not None and self.regret.worst > TOLERATED_REGRET


class AdaptiveGrid:
    """Chooses points of a grid until the held-out points are predicted well enough."""

    def __init__(self, grid: Sequence[Task], roofline: Roofline) -> None:
        self._grid = list(grid)
        self._roofline = roofline
        self._design = PointDesign(
            CandidateShapes(
                rows=[task.size for task in self._grid],
                context=[task.context for task in self._grid],
                batch=[task.batch for task in self._grid],
            ),
            roofline,
        )

    def first(self) -> list[Task]:
        """Space-filling points, chosen before anything is measured."""
        return [self._grid[index] for index in self._design.first(FIRST_POINTS)]

    def more(self, swept: SweepResult) -> list[Task] | None:
        """Further points, by the samples so far: [] if none is left, None if none is needed."""
        points = points_of(swept, "verify")
        if len(points) >= LEAST_POINTS and self._meets_goals(points, swept):
            return None
        chosen = [self._grid[index] for index in self._design.next(points, STEP_POINTS)]
        return [task for task in chosen if task not in swept.skipped]

    def uncertain(self, swept: SweepResult) -> Uncertainty | None:
        """The points behind choices of a tree size that cost more than is tolerated; None: none do.

        They are the held-out points of such a choice and their measured neighbours, from which
        they are predicted.
        """
        points = points_of(swept, "verify")
        check = self._check(self._quick_fit(points), swept)
        if check is None or not check.costs_too_much:
            return None
        # The calibration that the profile will have: its selection takes seconds.
        check = self._check(select_calibration(points, self._roofline).calibration, swept)
        if check is None or check.regret is None or not check.costs_too_much:
            return None
        measured = [task for task in swept.samples if task.kind == "verify"]
        held_out = [task for task in swept.samples if task.kind == "held_out"]
        tasks: set[Task] = set()
        here = np.flatnonzero(has_choices(check.points))
        points, predicted_s = check.points.take(here), check.predicted_s[here]
        for number in here[costly_choices(points, predicted_s, TOLERATED_REGRET)]:
            tasks |= {held_out[number], *_around(held_out[number], measured)}
        return Uncertainty(worst_regret=check.regret.worst, tasks=tuple(sorted(tasks)))

    def _meets_goals(self, points: Points, swept: SweepResult) -> bool:
        """Whether the held-out error and the decision regret meet the goals."""
        check = self._check(self._quick_fit(points), swept)
        return (
            check is not None
            and check.error.median <= max(GOAL_MEDIAN_ERROR, check.noise)
            and check.error.worst <= GOAL_WORST_ERROR
            and (check.regret is None or check.regret.worst <= GOAL_WORST_REGRET)
        )

    def _quick_fit(self, points: Points) -> Calibration:
        return fit_stairs(points, fit_physical(points, self._roofline))

    def _check(self, calibration: Calibration, swept: SweepResult) -> _HeldOutCheck | None:
        """The held-out points against a calibration; None where none are held out."""
        held_out = points_of(swept, "held_out")
        if len(held_out) == 0:
            return None
        predicted_s = calibration.predict_s(held_out.rows, held_out.context, held_out.batch)
        choices = has_choices(held_out)
        return _HeldOutCheck(
            points=held_out,
            predicted_s=predicted_s,
            error=ErrorSummary.of(predicted_s, held_out.seconds),
            regret=regret_at_contexts(held_out.take(choices), predicted_s[choices]),
            noise=float(np.median(held_out.median_error)),
        )


def _around(task: Task, measured: Sequence[Task]) -> Iterator[Task]:
    """The measured tasks next to one: of the contexts on both sides, the rows on both sides."""
    alike = [one for one in measured if one.batch == task.batch]
    for context in _next_to(task.context, [one.context for one in alike]):
        beside = {one.size: one for one in alike if one.context == context}
        yield from (beside[rows] for rows in _next_to(task.size, list(beside)))


def _next_to(value: int, values: Sequence[int]) -> set[int]:
    """The largest of the values up to `value`, and the smallest from it on."""
    below = [one for one in values if one <= value]
    above = [one for one in values if one >= value]
    return {*([max(below)] if below else []), *([min(above)] if above else [])}
