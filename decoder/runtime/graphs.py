"""The target's forward captured once a bucket of rows, and replayed on padded rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch

from decoder.kv_cache import KVCache
from decoder.parallel import ALONE, Ranks
from decoder.runtime.base import DenseVisible, Forwarded, RowBlock, RuntimeKind
from decoder.runtime.buckets import BUCKETS, padded_rows
from decoder.runtime.capture import BudgetedCapture, Capture
from decoder.runtime.eager import EagerRuntime
from decoder.runtime.step import ModelStep
from decoder.runtime.tables import RowTables, TablePlan, needed_words


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphShape:
    """What a captured forward is fixed to: padded rows of all sequences, words of ancestors."""

    rows: int
    words: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedStep:
    """A captured forward: fill the tables, replay, read the outputs."""

    tables: RowTables
    logits: torch.Tensor  # [rows, vocab]
    features: torch.Tensor | None  # [rows, width]
    replay: Callable[[], None]


class GraphRuntime:
    """Replays captured forwards; falls back to eager ones, and says so, where it cannot.

    Forwards are captured when a bucket is first needed, or up front by `prepare`, as long
    as the captured ones take less than `budget_bytes`. Rows beyond the largest bucket run
    eagerly. Graphs belong to one cache tensor and go with it. A drafter's forwards are
    recorded by the same `capture`, into the same memory and under the same budget. Where
    ranks share the model, a forward that one of them cannot capture runs eagerly on all.
    """

    kind: RuntimeKind = "graphs"

    def __init__(
        self,
        step: ModelStep,
        eager: EagerRuntime,
        capture: Capture,
        budget_bytes: int,
        ranks: Ranks = ALONE,
    ) -> None:
        self._step, self._eager = step, eager
        self.capture, self._ranks = BudgetedCapture(capture, budget_bytes), ranks
        self._captured: WeakKeyDictionary[KVCache, dict[GraphShape, CapturedStep]]
        self._captured = WeakKeyDictionary()
        self._refused: dict[GraphShape, str] = {}
        self._outputs: dict[str, torch.Tensor] = {}

    @property
    def buckets(self) -> tuple[int, ...]:
        return BUCKETS

    @property
    def warnings(self) -> tuple[str, ...]:
        own = [
            f"a forward of {shape.rows} rows runs eagerly: {reason}"
            for shape, reason in self._refused.items()
        ]
        return (*own, *self.capture.notes)

    @property
    def memory_bytes(self) -> int:
        """What the captured forwards have taken, a drafter's included."""
        return self.capture.memory_bytes

    def shapes(self, cache: KVCache) -> tuple[GraphShape, ...]:
        """What is captured for a cache."""
        return tuple(self._captured.get(cache, {}))

    def forward(self, cache: KVCache, blocks: Sequence[RowBlock]) -> Forwarded:
        rows = sum(block.rows for block in blocks)
        step = self._captured_step(cache, blocks)
        if step is None:
            return self._eager.forward(cache, blocks)
        step.tables.fill(cache, blocks)
        step.replay()
        features = None if step.features is None else step.features[:rows]
        return Forwarded(step.logits[:rows], features)

    @torch.inference_mode()
    def prepare(self, cache: KVCache, rows: int, sequences: int = 1) -> None:
        """Capture the buckets of up to `rows` rows a sequence, largest first.

        The largest first, so that the others fit into the memory that it has taken. Needs
        room for the rows in the cache; what it holds of them stays pending to nobody.
        """
        largest = padded_rows(rows, 1) or BUCKETS[-1]
        for size in sorted((size for size in BUCKETS if size <= largest), reverse=True):
            room = all(cache.end(s) + size <= cache.capacity for s in range(sequences))
            if room:
                blocks = [_chain_block(sequence, size) for sequence in range(sequences)]
                self._captured_step(cache, blocks)

    def forget(self) -> None:
        self._captured.clear()
        self._refused.clear()
        self._outputs.clear()

    def _captured_step(self, cache: KVCache, blocks: Sequence[RowBlock]) -> CapturedStep | None:
        rows = padded_rows(sum(block.rows for block in blocks), len(blocks))
        if rows is None:
            return None
        shape = GraphShape(rows=rows, words=needed_words(cache, blocks))
        known = self._captured.setdefault(cache, {})
        if shape not in known and shape not in self._refused:
            step, reason = self._try(cache, blocks, shape)
            reason = self._ranks.any_text(reason)
            if reason:
                self._refuse(shape, reason)
            elif step is not None:
                known[shape] = step
        return known.get(shape)

    def _try(
        self, cache: KVCache, blocks: Sequence[RowBlock], shape: GraphShape
    ) -> tuple[CapturedStep | None, str]:
        """The captured forward, or None and why there is none."""
        try:
            return self._record(cache, blocks, shape), ""
        except RuntimeError as error:  # out of memory, or of the budget
            return None, str(error).partition("\n")[0] or type(error).__name__

    def _record(
        self, cache: KVCache, blocks: Sequence[RowBlock], shape: GraphShape
    ) -> CapturedStep:
        step, tables = (
            self._step,
            RowTables(shape.rows, cache.sequences, shape.words, self._step.device),
        )
        tables.fill(cache, blocks)
        plan = TablePlan(cache.data, tables)
        logits = self._output("logits", shape.rows, step.vocab)
        features = None
        if step.captured:
            features = self._output("features", shape.rows, step.feature_width)

        def run() -> None:
            hidden, states = step.run(tables.tokens, tables.positions, plan)
            step.logits_into(hidden, logits)
            if features is not None and states is not None:
                features.copy_(states)

        replay = self.capture.record(run)
        return CapturedStep(tables=tables, logits=logits, features=features, replay=replay)

    def _output(self, name: str, rows: int, width: int) -> torch.Tensor:
        """The first rows of a tensor that all graphs share; a longer one for later graphs."""
        kept = self._outputs.get(name)
        if kept is None or kept.shape[0] < rows or kept.shape[1] != width:
            kept = torch.empty(rows, width, dtype=self._step.dtype, device=self._step.device)
            self._outputs[name] = kept
        return kept[:rows]

    def _refuse(self, shape: GraphShape, reason: str) -> None:
        self._refused[shape] = reason
        logging.getLogger(__name__).warning(
            "cannot capture a forward of %d rows, running it eagerly: %s", shape.rows, reason
        )


def _chain_block(sequence: int, rows: int) -> RowBlock:
    """Rows of which each sees those before it; any tokens do for a capture."""
    visible = DenseVisible(np.tri(rows, dtype=np.bool_)) if rows > 1 else None
    return RowBlock(sequence, np.zeros(rows, np.int64), np.arange(rows), visible)
