"""The points of an engine's calibration, and the steps that measure them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from costmodel.errors import InputError
from integrations.vllm.engine import PROMPT_TOKENS, SteppedEngine
from profiler.calibrate.workload import Task

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)  # few: each comes at every batch and context
PROMPTS = (32, 64, 128, 256, 512, 1024)  # each in one step
HELD_OUT_SHAPES = 4  # (context, batch) pairs
HELD_OUT_ROWS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """The points that an engine's calibration may measure; validated on construction."""

    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    most_rows: int
    drafts: bool
    seed: int = 0

    def __post_init__(self) -> None:
        if len(set(self.contexts)) < 2:
            raise InputError("a calibration needs two contexts or more", hint="As 256,1024.")
        if min(self.contexts) <= PROMPT_TOKENS:
            raise InputError(
                f"contexts in an engine begin at {PROMPT_TOKENS + 1} tokens, "
                f"got {min(self.contexts)}"
            )
        if self.most_rows < 2:
            raise InputError(f"max nodes must be 1 or more, got {self.most_rows - 1}")

    def grid(self) -> list[Task]:
        rows = sorted({rows for rows in ROWS if rows < self.most_rows} | {self.most_rows})
        return [
            Task(kind="verify", size=size, context=context, batch=batch)
            for batch in self.batches
            for context in self.contexts
            for size in rows
        ]

    def held_out(self) -> list[Task]:
        """Points that no fit uses, drawn from the seed before anything is measured.

        Contexts and batches are log-uniform, a third of the batches as in the grid; row counts
        are stratified and include the plain step.
        """
        random = np.random.default_rng((self.seed, 7919))
        low, high = np.log(min(self.contexts)), np.log(max(self.contexts))
        edges = np.linspace(np.log(2), np.log(self.most_rows), HELD_OUT_ROWS + 1)
        tasks = set()
        for context in np.exp(random.uniform(low, high, HELD_OUT_SHAPES)):
            batch = round(np.exp(random.uniform(0, np.log(max(self.batches)))))
            drawn = np.exp(random.uniform(edges[:-1], edges[1:]))
            for rows in {1, *np.rint(drawn).astype(int).tolist()}:
                tasks.add(Task(kind="held_out", size=rows, context=round(context), batch=batch))
        return sorted(tasks)

    def draft_tasks(self) -> list[Task]:
        """A full grid of draft lengths; empty where no drafter was named."""
        if not self.drafts:
            return []
        longest = self.most_rows - 1
        lengths = sorted({0, 1, max(longest // 2, 1), longest})
        contexts = sorted({min(self.contexts), max(self.contexts)})
        batches = sorted({min(self.batches), max(self.batches)})
        return [
            Task(kind="draft", size=tokens, context=context, batch=batch)
            for batch in batches
            for tokens in lengths
            for context in contexts
        ]

    def prefill_tasks(self) -> list[Task]:
        """Prompts of PROMPTS tokens that the contexts have room for, each in one step."""
        return [
            Task(kind="prefill", size=tokens, context=0)
            for tokens in PROMPTS
            if tokens <= max(self.contexts)
        ]


class EngineWorkload:
    """Turns tasks into steps of an engine; each call returns the seconds that count."""

    def __init__(self, engine: SteppedEngine) -> None:
        self._engine = engine
        self.host_s: list[float] = []

    def call(self, task: Task) -> Callable[[], float]:
        if task.kind == "prefill":
            return lambda: self._engine.prefill(task.size).verify_s
        drafts = task.kind == "draft"

        def run() -> float:
            time = self._engine.step(
                rows=task.size + 1 if drafts else task.size,
                context=task.context,
                batch=task.batch,
                draft_tokens=task.size if drafts else 0,
            )
            self.host_s.append(time.host_s)
            return time.draft_s if drafts else time.verify_s

        return run

    def shortfall(self, task: Task) -> str:
        """The reason why the engine cannot take the task; empty where it can."""
        engine = self._engine
        if task.kind == "prefill" and task.size > engine.longest_prompt:
            return f"the engine takes prompts of {engine.longest_prompt} tokens in one step"
        if task.context > engine.longest_context:
            return f"the engine's max_model_len leaves room for {engine.longest_context} tokens"
        if task.batch > engine.most_requests:
            return f"the engine runs {engine.most_requests} sequences at once"
        return ""
