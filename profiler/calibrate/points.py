"""The points of a calibration: the planned ones, and further ones chosen while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from costmodel.calibration.choices import doubt, has_choices, likely_regret, most_rows_that_pay
from costmodel.calibration.design import PointDesign, quick_fit
from costmodel.calibration.points import Calibration, ErrorSummary, Points
from costmodel.roofline import Roofline
from profiler.calibrate.sections import points_of
from profiler.calibrate.sweep import SweepResult, Task

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1025)
PREFILL_TOKENS = (64, 256)
BUILD_NODES = (1, 3, 7, 15, 31, 63, 127, 255, 511, 1023)
COMMIT_TOKENS = (1, 2, 4, 8)


def verify_grid(
    rows: Sequence[int], contexts: Sequence[int], batches: Sequence[int] = (1,)
) -> list[Task]:
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
class DecoderPoints:
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
        """Tokens of each batch size's KV cache; of the further ones for plain steps alone."""
        plain = {task.batch: task.context + 1 for task in self._plain_steps()}
        return dict.fromkeys(self.batches, self.capacity) | plain

    def _plain_steps(self) -> list[Task]:
        """Those of further batches, at the shortest and the middle context, which still fit."""
        ordered = sorted(self.contexts)
        contexts = sorted({ordered[0], ordered[len(ordered) // 2]})
        batches = sorted(set(self.plain_batches) - set(self.batches))
        return [Task(kind="plain", size=1, context=c, batch=b) for b in batches for c in contexts]

    def grid(self) -> list[Task]:
        return verify_grid(self.rows, self.contexts, self.batches)

    def held_out(self, most_rows: int) -> list[Task]:
        """Points that no fit uses, drawn from the seed and `most_rows`, at the smallest batch.

        Contexts are log-uniform, and so are row counts, one a stratum. Each context also has a
        plain step, so that the decision regret can be computed there.
        """
        random = np.random.default_rng((self.seed, 7919))
        low, high = np.log(min(self.contexts)), np.log(max(self.contexts))
        batch, tasks = min(self.batches), set()
        for context in np.exp(random.uniform(low, high, self.held_out_contexts)):
            drawn = draw_rows(random, min(most_rows, self.max_nodes + 1), self.held_out_rows)
            for rows in {1, *map(self.padded, drawn)}:
                tasks.add(Task(kind="held_out", size=rows, context=round(context), batch=batch))
        return sorted(tasks)

    def stages(self) -> list[Task]:
        middle = sorted(self.contexts)[len(self.contexts) // 2]
        builds = sorted({n for n in BUILD_NODES if n <= self.max_nodes} | {self.max_nodes})
        prompts = [tokens for tokens in self.prefill_tokens if tokens <= max(self.contexts)]
        tasks = [Task(kind="prefill", size=tokens) for tokens in prompts] + self._plain_steps()
        tasks += [Task(kind="draft", size=1, context=context) for context in self.contexts]
        for kind in ("build", "accept", "accept_sampled"):
            tasks += [Task(kind=kind, size=nodes) for nodes in builds]
        commits = [tokens for tokens in COMMIT_TOKENS if 2 * tokens <= self.max_nodes]
        return tasks + [Task(kind="commit", size=size, context=middle) for size in commits]


FIRST_POINTS = 8
STEP_POINTS = 6
LEAST_POINTS = 24  # fewer may meet the goals by chance
GOAL_MEDIAN_ERROR = 0.01
GOAL_WORST_ERROR = 0.05
GOAL_MEAN_REGRET = 0.003
GOAL_WORST_REGRET = 0.02
ROUGH = 0.25  # what rough times may be off by when sizes are told that no tree will have
LEAST_ROWS = 8  # fewer leave no choice that could be judged, even where no tree seems to pay
LEAST_REPEATS = 24  # samples taken before the points in doubt are chosen again
REPEAT_SHARE = 0.1  # of the samples so far, where that is more
HELD_OUT_SHARE = 1 / 3  # of further samples
FEW_SHARE = 0.3  # of them, for points that have few
CONTRADICTS = 0.15  # least deviation of a median that the other points do not explain
SETTLED = 12  # samples of such a point from which on it is taken for what it is


class AdaptiveGrid:
    """Chooses points of a grid, and then points to time again, by what a choice depends on.

    Rows beyond those that the most optimistic acceptance curve may pay for are timed at first
    points alone: for the linear line and the picture.
    """

    def __init__(
        self,
        grid: Sequence[Task],
        roofline: Roofline,
        held_out: Callable[[int], Sequence[Task]] | None = None,
    ) -> None:
        """held_out: the points to hold out where trees have up to so many rows. None: they are
        measured anyway, and no row count is too large to matter
        """
        self._grid = list(grid)
        self._roofline = roofline
        self._held_out = held_out
        self._most_rows = max(task.size for task in grid)
        self._random = np.random.default_rng(0)

    def first(self) -> list[Task]:
        """Space-filling points, chosen before anything is measured."""
        return [self._grid[index] for index in self._design(self._grid).first(FIRST_POINTS)]

    def more(self, swept: SweepResult) -> list[Task]:
        """Further points by the samples so far: held-out ones first, then those of least error."""
        points = points_of(swept, "verify")
        if self._held_out is not None:
            # Trees have at most the rows that may pay by rough times.
            c, fitted = _shapes(self._grid), quick_fit(points, self._roofline)
            if fitted is not None:
                rough = replace(c, seconds=fitted.predict_s(c.rows, c.context, c.batch))
                self._most_rows = max(most_rows_that_pay(rough, ROUGH), LEAST_ROWS)
            held_out, self._held_out = self._held_out(self._most_rows), None
            return [*held_out, *self._further(points, swept)]
        fitted = quick_fit(points, self._roofline) if len(points) >= LEAST_POINTS else None
        if fitted is None or "predictions" not in _goals_met(fitted, points_of(swept, "held_out")):
            return self._further(points, swept)
        return []

    def again(self, swept: SweepResult) -> list[Task]:
        """Points to time again, each once; [] where the choices meet their goals."""
        fitted = quick_fit(points_of(swept, "verify"), self._roofline)
        if fitted is None:
            return [task for task in swept.samples if task.kind == "verify"]
        taken = sum(samples.n for samples in swept.samples.values())
        count = max(LEAST_REPEATS, int(REPEAT_SHARE * taken))
        wild: list[Task] = []
        drawn: list[Task] = []
        for kind, part in (("verify", 1 - HELD_OUT_SHARE), ("held_out", HELD_OUT_SHARE)):
            points = points_of(swept, kind)
            if len(points) == 0:  # such as held-out ones that do not fit into memory
                continue
            tasks = [task for task in swept.samples if task.kind == kind]
            predicted_s = fitted.predict_s(points.rows, points.context, points.batch)
            # Few samples that the other points contradict may all be of one disturbed phase.
            off = np.abs(np.log(points.seconds / predicted_s))
            contradicted = off > np.maximum(CONTRADICTS, 4 * points.median_error)
            few = np.flatnonzero(contradicted & (points.n < SETTLED))
            wild += [tasks[number] for number in few]
            share = self._shares(points, predicted_s)
            size = min(round(count * part), np.count_nonzero(share))
            numbers = self._random.choice(len(tasks), size, replace=False, p=share)
            drawn += [tasks[number] for number in numbers]
        held_out = points_of(swept, "held_out")
        if not wild and (not len(held_out) or "choices" in _goals_met(fitted, held_out)):
            return []
        return list(dict.fromkeys(wild + drawn))

    def _shares(self, points: Points, predicted_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Each point's share of further samples; none beyond the sizes that may pay."""
        within = points.rows <= self._most_rows
        few = within / points.n
        score = within * doubt(points, predicted_s)
        if score.sum() == 0:
            return few / few.sum()
        return (1 - FEW_SHARE) * score / score.sum() + FEW_SHARE * few / few.sum()

    def _further(self, points: Points, swept: SweepResult) -> list[Task]:
        """The points of the grid that no tree is too large for, of least expected error."""
        within = [task for task in self._grid if task.size <= self._most_rows]
        chosen = [within[index] for index in self._design(within).next(points, STEP_POINTS)]
        return [task for task in chosen if task not in swept.skipped]

    def _design(self, tasks: Sequence[Task]) -> PointDesign:
        return PointDesign(_shapes(tasks), self._roofline)


def _goals_met(calibration: Calibration, held_out: Points) -> set[str]:
    """Which of `choices` and `predictions` meet their goals at held-out points; {} without any."""
    if len(held_out) == 0:
        return set()
    predicted_s = calibration.predict_s(held_out.rows, held_out.context, held_out.batch)
    error, choices = ErrorSummary.of(predicted_s, held_out.seconds), has_choices(held_out)
    regret = likely_regret(held_out.take(choices), predicted_s[choices])
    if regret and (regret.mean > GOAL_MEAN_REGRET or regret.worst > GOAL_WORST_REGRET):
        return set()
    noise = float(np.median(held_out.median_error))
    close = error.median <= max(GOAL_MEDIAN_ERROR, noise) and error.worst <= GOAL_WORST_ERROR
    return {"choices", "predictions"} if close else {"choices"}


def _shapes(tasks: Sequence[Task]) -> Points:
    """The points of tasks that have no times yet."""
    return Points(
        rows=[task.size for task in tasks],
        context=[task.context for task in tasks],
        batch=[task.batch for task in tasks],
        seconds=np.full(len(tasks), np.nan),
    )
