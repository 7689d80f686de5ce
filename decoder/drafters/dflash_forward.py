"""The two passes of a DFlash drafter over one text, eagerly or as captured graphs."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from decoder.device import to_device
from decoder.drafters.blocks import DraftCache, Rope, Rotary
from decoder.drafters.caches import DraftCacheShape, Place, SharedCaches
from decoder.drafters.dflash_model import DFlashPasses
from decoder.drafters.draft_head import DraftHead
from decoder.drafters.row_forwards import ALL_ROWS, RowForwards, TableCache
from decoder.runtime.base import DenseVisible, RowBlock
from decoder.runtime.capture import BudgetedCapture
from decoder.runtime.functions import Tensors
from decoder.runtime.tables import RowTables
from decoder.target import Target


class Forward(Protocol):
    """The context of one text in the draft cache, and blocks behind it."""

    @property
    def length(self) -> int:
        """Tokens of the context."""

    def cut(self, tokens: int) -> None:
        """Forget the context behind its first tokens."""

    def take_in(self, features: torch.Tensor) -> None:
        """Append the target's features [tokens, ids * hidden] to the context."""

    def block(self, tokens: NDArray[np.int64], depth: int) -> torch.Tensor:
        """Logits [depth, head] behind the first token of a block, int64 [block]."""


class EagerForward:
    """One operation after the other, over a cache of the text's own that doubles."""

    def __init__(
        self, passes: DFlashPasses, target: Target, rotary: Rotary, head: DraftHead
    ) -> None:
        self._passes, self._target, self._rotary, self._head = passes, target, rotary, head
        config = passes.config
        self._cache = DraftCache(config.shape, config.layers, target.dtype, target.device)

    @property
    def length(self) -> int:
        """See `Forward`."""
        return self._cache.length

    def cut(self, tokens: int) -> None:
        """See `Forward`."""
        self._cache.length = min(self._cache.length, tokens)

    def take_in(self, features: torch.Tensor) -> None:
        """See `Forward`."""
        self._passes.add_context(features, self._rope(len(features)), self._cache)

    def block(self, tokens: NDArray[np.int64], depth: int) -> torch.Tensor:
        """See `Forward`."""
        embedded = self._target.embed(to_device(tokens, self._target.device))
        hidden = self._passes.block(embedded, self._rope(len(tokens)), self._cache)
        return self._head.logits(hidden[1 : 1 + depth])

    def _rope(self, rows: int) -> Rope:
        start = self._cache.length
        return self._rotary.between(start, start + rows, self._target.dtype)


class CapturedBlocks:
    """Both passes captured, for all texts of a drafter.

    The block's pass goes from token ids to logits; what follows (softmax and the best
    candidates) depends on each round's depth, width and temperature and is launched as it
    is. The features of a long prompt are taken in uncaptured. Layers with a window look its
    slots up; the others attend with the target's own kernel.
    """

    def __init__(
        self,
        passes: DFlashPasses,
        target: Target,
        rotary: Rotary,
        head: DraftHead,
        capture: BudgetedCapture,
    ) -> None:
        self._passes, self._target, self._rotary, self._head = passes, target, rotary, head
        self.capture = capture
        shape = passes.config.shape
        cache_shape = DraftCacheShape(
            layers=passes.config.layers, kv_heads=shape.kv_heads, head_dim=shape.head_dim
        )
        self.caches = SharedCaches(cache_shape, target.dtype, target.device, target)
        self.take_in = RowForwards("taking in features", self._take_in, capture)
        self.block = RowForwards("the draft of a block", self._block, capture)

    def visible(self, rows: int) -> DenseVisible:
        """What block rows see of their block in layers without a window, which are all alike."""
        causal = any(causal for window, causal in self._passes.config.kinds if window is None)
        seen = np.tri(rows, dtype=np.bool_) if causal else np.ones((rows, rows), np.bool_)
        return DenseVisible(seen)

    def _take_in(self, tables: RowTables, data: torch.Tensor, features: torch.Tensor) -> Tensors:
        rope = self._rotary(tables.positions, self._target.dtype)
        self._passes.store_context(features, rope, TableCache(data, tables))
        return ()

    def _block(self, tables: RowTables, data: torch.Tensor) -> Tensors:
        config, cache, dtype = self._passes.config, TableCache(data, tables), self._target.dtype
        spans = {
            (window, causal): ALL_ROWS
            if window is None
            else cache.window(window, causal, config.shape.group, dtype)
            for window, causal in set(config.kinds)
        }
        embedded = self._target.embed(tables.tokens)
        hidden = self._passes.fill_in(embedded, self._rotary(tables.positions, dtype), cache, spans)
        return (self._head.logits(hidden),)


class GraphedForward:
    """One text in a shared cache, over captured passes."""

    def __init__(self, captured: CapturedBlocks) -> None:
        self._captured = captured
        self._place: Place | None = None

    @property
    def length(self) -> int:
        """See `Forward`."""
        return 0 if self._place is None else self._place.length

    def cut(self, tokens: int) -> None:
        """See `Forward`."""
        if self._place is not None:
            self._place.cut(tokens)

    def take_in(self, features: torch.Tensor) -> None:
        """See `Forward`."""
        rows = len(features)
        place = self._room(rows)
        tokens = np.zeros(rows, np.int64)  # not read
        block = RowBlock(place.sequence, tokens, np.arange(rows), None)
        self._captured.take_in(place, block, features)
        place.cache.lengths[place.sequence] += rows

    def block(self, tokens: NDArray[np.int64], depth: int) -> torch.Tensor:
        """See `Forward`."""
        rows = len(tokens)
        place = self._room(rows)
        visible = self._captured.visible(rows)
        block = RowBlock(place.sequence, tokens, np.arange(rows), visible)
        (logits,) = self._captured.block(place, block)
        return logits[1 : min(1 + depth, rows)]

    def _room(self, rows: int) -> Place:
        self._place = self._captured.caches.room(self, self._place, rows)
        return self._place
