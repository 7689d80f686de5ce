"""Which points a calibration covers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from costmodel.errors import InputError
from profiler.workload import Task

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1025)
PREFILL_TOKENS = (128, 512)
BUILD_NODES = (1, 3, 7, 15, 31, 63, 127, 255, 511, 1023)
COMMIT_TOKENS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """What a calibration covers; validated on construction.

    buckets         row counts that the runtime pads forwards to, which alone are measured;
                    none where it does not pad
    prefill_tokens  prompt lengths, as far as the largest context goes
    plain_batches   batches at which the plain step is measured beside those of the grid
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

    def __post_init__(self) -> None:
        for name, values in (("contexts", self.contexts), ("batches", self.batches)):
            if not values or any(value < 1 for value in values):
                raise InputError(f"{name} must be whole numbers of 1 or more, got {values}")
            if len(set(values)) < len(values):
                raise InputError(f"{name} must not repeat, got {values}")
        if len(self.contexts) < 2:
            raise InputError("a calibration needs two contexts or more", hint="As 256,1024.")
        if self.max_nodes < 3:
            raise InputError(f"max nodes must be 3 or more, got {self.max_nodes}")

    @property
    def rows(self) -> tuple[int, ...]:
        """Row counts of the grid, up to the largest tree and that one itself."""
        most = self.padded(self.max_nodes + 1)
        usual = self.buckets or ROWS
        return tuple(sorted({row for row in usual if row <= most} | {most}))

    def padded(self, rows: int) -> int:
        """Rows that a forward of `rows` rows runs."""
        return next((size for size in self.buckets if size >= rows), rows)

    @property
    def capacity(self) -> int:
        """Cache length that every point fits in."""
        return max(self.contexts) + self.padded(self.max_nodes + 1)

    def capacities(self) -> dict[int, int]:
        """The same for the batches of which only the plain step is measured."""
        return {batch: max(self._plain_contexts) + 1 for batch in self._further_batches}

    @property
    def _further_batches(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.plain_batches) - set(self.batches)))

    @property
    def _plain_contexts(self) -> tuple[int, ...]:
        """The shortest and the middle context, where many sequences still fit into memory."""
        ordered = sorted(self.contexts)
        return tuple(sorted({ordered[0], ordered[len(ordered) // 2]}))

    def grid(self) -> list[Task]:
        return [
            Task(kind="verify", size=rows, context=context, batch=batch)
            for batch in self.batches
            for context in self.contexts
            for rows in self.rows
        ]

    def held_out(self) -> list[Task]:
        """Points that are never fitted: log-uniform contexts, log-uniform rows in each.

        Drawn from the seed before anything is measured. Rows are stratified over the range,
        one draw a stratum, and a plain step is added, so that each context can also tell
        what choosing a tree size from the predictions costs. All of the smallest batch.
        """
        random = np.random.default_rng((self.seed, 7919))
        low, high = np.log(min(self.contexts)), np.log(max(self.contexts))
        edges = np.linspace(np.log(2), np.log(self.max_nodes + 1), self.held_out_rows + 1)
        tasks = set()
        for context in np.exp(random.uniform(low, high, self.held_out_contexts)):
            drawn = np.exp(random.uniform(edges[:-1], edges[1:]))
            drawn_rows = (self.padded(rows) for rows in np.rint(drawn).astype(int).tolist())
            for rows in {1, *drawn_rows}:
                tasks.add(
                    Task(
                        kind="held_out",
                        size=rows,
                        context=round(context),
                        batch=min(self.batches),
                    )
                )
        return sorted(tasks)

    def stages(self) -> list[Task]:
        """Everything in a cycle but the verify forward, and the prefill."""
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
        tasks += [Task(kind="accept", size=nodes) for nodes in builds]
        tasks += [
            Task(kind="commit", size=tokens, context=middle)
            for tokens in COMMIT_TOKENS
            if 2 * tokens <= self.max_nodes
        ]
        return tasks

    def tasks(self) -> list[Task]:
        return self.grid() + self.held_out() + self.stages()
