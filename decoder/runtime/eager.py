"""Forwards of exactly the rows that are there, launched one operation at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from decoder.attention import AttentionPlan, ForwardPlan, plan_segment
from decoder.kv_cache import KVCache
from decoder.runtime.base import Forwarded, RowBlock, RuntimeKind
from decoder.runtime.capture import BudgetedCapture
from decoder.runtime.step import ModelStep
from decoder.runtime.tables import RowTables, TablePlan, needed_words
from decoder.runtime.triton_support import kernels_usable


class EagerRuntime:
    """Runs any model on any device, without padding.

    Where Triton kernels run, it attends with them, as a graph does; elsewhere sequence by
    sequence with PyTorch operations.
    """

    kind: RuntimeKind = "eager"
    capture: BudgetedCapture | None = None
    buckets: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()

    def __init__(self, step: ModelStep, group: int) -> None:
        """group: query heads that share a KV head."""
        self._step = step
        self._group = group

    def forward(
        self, cache: KVCache, blocks: Sequence[RowBlock], *, last_only: bool = False
    ) -> Forwarded:
        """One forward; with `last_only` the logits of the last row alone."""
        if kernels_usable(self._step.device):
            tokens, positions, plan = self._with_tables(cache, blocks)
        else:
            tokens, positions, plan = self._with_segments(cache, blocks)
        hidden, features = self._step.run(tokens, positions, plan)
        return Forwarded(self._step.head(hidden[-1:] if last_only else hidden), features)

    def forget(self) -> None:
        """Nothing is kept from one forward to the next."""

    def _with_tables(
        self, cache: KVCache, blocks: Sequence[RowBlock]
    ) -> tuple[torch.Tensor, torch.Tensor, AttentionPlan]:
        rows = sum(block.rows for block in blocks)
        words = needed_words(cache, blocks)
        tables = RowTables(rows, cache.sequences, words, self._step.device)
        tables.fill(cache, blocks)
        return tables.tokens, tables.positions, TablePlan(cache.data, tables)

    def _with_segments(
        self, cache: KVCache, blocks: Sequence[RowBlock]
    ) -> tuple[torch.Tensor, torch.Tensor, AttentionPlan]:
        device, first = self._step.device, 0
        segments, tokens, positions = [], [], []
        for block in blocks:
            visible = None
            if block.visible is not None:
                visible = torch.from_numpy(block.visible.dense()).to(device)
            rows = slice(first, first + block.rows)
            segments.append(plan_segment(cache, block.sequence, rows, visible, self._group))
            tokens.append(torch.from_numpy(block.tokens).to(device))
            offsets = torch.from_numpy(block.offsets).to(device)
            positions.append(offsets + cache.lengths[block.sequence])
            first = rows.stop
        return _join(tokens), _join(positions), ForwardPlan(cache, tuple(segments))


def _join(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
