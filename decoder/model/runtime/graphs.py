"""The graph runtime: forwards captured once a bucket of rows, and replayed on padded rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from decoder.configs import first_reason
from decoder.model.attention import RowBlock
from decoder.model.kv_cache import KVCache
from decoder.model.runtime.capture import BUCKETS, Capture, ChosenTokens, Replay, bucket
from decoder.model.runtime.eager import (
    EagerRuntime,
    ForwardOutputs,
    ModelStep,
    RuntimeKind,
    greedy_tokens,
)
from decoder.model.runtime.fused import TableAttention
from decoder.model.runtime.tables import RowTables, needed_words, whole_words


class GraphShape(NamedTuple):
    """The sizes of a captured forward: its padded rows, and the words of a row's ancestor bits."""

    rows: int
    words: int


class CapturedStep(NamedTuple):
    """A captured forward: fill the tables, call `replay`, read the outputs."""

    tables: RowTables
    logits: Tensor  # [rows, vocab]
    features: Tensor | None  # [rows, width]
    chosen: ChosenTokens
    replay: Replay


class GraphRuntime:
    """Replays captured forwards; a forward that cannot be captured runs eagerly, with a warning.

    A forward is captured when its bucket is first needed, or by `prepare`, within the budget of
    `capture`, which a drafter's forwards share. More rows than the largest bucket run eagerly.
    Graphs belong to one cache and are dropped with it.
    """

    kind: RuntimeKind = "graphs"

    def __init__(self, step: ModelStep, eager: EagerRuntime, capture: Capture) -> None:
        self._step, self.eager, self.capture = step, eager, capture
        self._captured: WeakKeyDictionary[KVCache, dict[GraphShape, CapturedStep]]
        self._captured = WeakKeyDictionary()
        self._refused: WeakKeyDictionary[KVCache, dict[GraphShape, str]] = WeakKeyDictionary()
        self._outputs: dict[str, Tensor] = {}
        self._hidden: tuple[str, ...] = ()

    @property
    def buckets(self) -> tuple[int, ...]:
        return BUCKETS

    @property
    def warnings(self) -> tuple[str, ...]:
        refusals = [
            f"a forward of {shape.rows} rows runs eagerly: {reason}"
            for refused in self._refused.values()
            for shape, reason in refused.items()
        ]
        return (*self._hidden, *refusals, *self.capture.notes)

    def forward(self, cache: KVCache, blocks: Sequence[RowBlock]) -> ForwardOutputs:
        rows = sum(block.rows for block in blocks)
        if self.eager.hides(cache, blocks):
            self._hidden = ("beyond a layer's window, forwards run eagerly",)
            return self.eager.forward(cache, blocks)
        step = self._captured_step(cache, blocks)
        if step is None:
            return self.eager.forward(cache, blocks)
        step.tables.fill(cache, blocks)
        step.replay()
        step.chosen.send()
        features = None if step.features is None else step.features[:rows]
        return ForwardOutputs(step.logits[:rows], features, step.chosen)

    def refusal(self, cache: KVCache, rows: int) -> str:
        """The reason why a forward of so many rows runs uncaptured; empty where it does not."""
        padded, refused = bucket(rows), self._refused.get(cache, {})
        return next((why for shape, why in refused.items() if shape.rows == padded), "")

    @torch.inference_mode()
    def prepare(self, cache: KVCache, rows: int, sequences: int = 1) -> None:
        """Capture the forwards of up to `rows` rows a sequence, largest first.

        Smaller ones then fit into the memory of the largest. Those for which the cache has no
        room are left out. The rows written meanwhile do not become pending.
        """
        largest = bucket(rows * sequences) or BUCKETS[-1]
        for size in reversed(BUCKETS[: BUCKETS.index(largest) + 1]):
            shares = [len(range(s, size, sequences)) for s in range(min(size, sequences))]
            if all(cache.end(s) + share <= cache.capacity for s, share in enumerate(shares)):
                any_rows = [np.zeros(share, np.int64) for share in shares]
                blocks = [RowBlock(s, ids, ids, None) for s, ids in enumerate(any_rows)]
                self._captured_step(cache, blocks)

    def forget(self) -> None:
        """Drop captured work, because the model or its captured layers have changed."""
        self._captured.clear()
        self._refused.clear()
        self._outputs.clear()

    def _captured_step(self, cache: KVCache, blocks: Sequence[RowBlock]) -> CapturedStep | None:
        rows = bucket(sum(block.rows for block in blocks))
        if rows is None:
            return None
        words = max(needed_words(cache, blocks), whole_words(rows))  # whoever has the rows
        shape = GraphShape(rows=rows, words=words)
        captured = self._captured.setdefault(cache, {})
        refused = self._refused.setdefault(cache, {})
        if shape not in captured and shape not in refused:
            try:
                captured[shape] = self._record(cache, blocks, shape)
            except RuntimeError as error:  # out of memory, or of the budget
                refused[shape] = first_reason(error)
                message = "cannot capture a forward of %d rows, running it eagerly: %s"
                logging.getLogger(__name__).warning(message, rows, first_reason(error))
        return captured.get(shape)

    def _record(
        self, cache: KVCache, blocks: Sequence[RowBlock], shape: GraphShape
    ) -> CapturedStep:
        step = self._step
        tables = RowTables(shape.rows, cache.sequences, shape.words, step.device)
        tables.fill(cache, blocks)
        plan = TableAttention(cache.data, tables)
        logits = self._output("logits", shape.rows, step.vocab)
        chosen = ChosenTokens(shape.rows, step.device)
        features = None
        if step.captured:
            width = len(step.captured) * int(step.embedding.weight.shape[1])
            features = self._output("features", shape.rows, width)

        def run() -> None:
            hidden, states = step.run(tables.tokens, tables.positions, plan)
            step.logits_into(hidden, logits)
            chosen.put(greedy_tokens(logits))
            if features is not None and states is not None:
                features.copy_(states)

        replay = self.capture.record(run)
        return CapturedStep(tables, logits, features, chosen, replay)

    def _output(self, name: str, rows: int, width: int) -> Tensor:
        """The first rows of an output that graphs share, allocated anew where it is too small."""
        output = self._outputs.get(name)
        if output is None or output.shape[0] < rows or output.shape[1] != width:
            output = torch.empty(rows, width, dtype=self._step.dtype, device=self._step.device)
            self._outputs[name] = output
        return output[:rows]
