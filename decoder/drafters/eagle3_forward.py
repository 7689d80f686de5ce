"""The passes of an EAGLE-3 drafter over one text and its trees, eagerly or as captured graphs."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from decoder.device import to_device
from decoder.drafters.blocks import DraftCache, Rotary, Span, span
from decoder.drafters.caches import DraftCacheShape, Place, SharedCaches
from decoder.drafters.eagle3_model import Eagle3Model
from decoder.drafters.row_forwards import ALL_ROWS, RowForwards, TableCache
from decoder.growth import Frontier
from decoder.runtime.base import DenseVisible, RowBlock
from decoder.runtime.buckets import BUCKETS
from decoder.runtime.capture import BudgetedCapture
from decoder.runtime.functions import Tensors
from decoder.runtime.tables import RowTables
from decoder.target import Target


class Forward(Protocol):
    """The context of one text in the draft cache, and trees that grow behind it."""

    @property
    def length(self) -> int:
        """Tokens of the context."""

    def cut(self, tokens: int) -> None:
        """Forget the context behind its first tokens; more must come before a tree is grown."""

    def extend(self, hidden: torch.Tensor, next_tokens: NDArray[np.int64]) -> None:
        """Append rows of narrowed features [rows, hidden] and the tokens after them."""

    def root(self) -> torch.Tensor:
        """Logits [1, draft_vocab] below the bonus token; starts a new tree."""

    def expand(self, frontier: Frontier) -> torch.Tensor:
        """Logits [F, draft_vocab] below the frontier's nodes."""


class Embedding:
    """Embeddings [rows, hidden] of target tokens: the drafter's own, or the target's."""

    def __init__(self, model: Eagle3Model, target: Target) -> None:
        self._model, self._target = model, target

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        if self._model.config.own_embedding:
            embedded: torch.Tensor = self._model.embed_tokens(ids)
            return embedded
        return self._target.embed(ids)


class EagerForward:
    """One operation after the other, over a cache of the text's own that doubles."""

    def __init__(self, model: Eagle3Model, target: Target, rotary: Rotary) -> None:
        self._model, self._rotary = model, rotary
        self._embed = Embedding(model, target)
        self._cache = DraftCache(model.config.shape, 1, target.dtype, target.device)
        self._root = torch.empty(0)  # the layer's output [1, hidden] at the newest row
        self._hidden = self._root  # the layer's output at the rows of the last answer
        self._ancestors = np.zeros((1, 0), np.bool_)  # of these, among the tree's rows so far

    @property
    def length(self) -> int:
        """See `Forward`."""
        return self._cache.length

    def cut(self, tokens: int) -> None:
        """See `Forward`."""
        self._cache.length = min(self._cache.length, tokens)

    @torch.inference_mode()
    def extend(self, hidden: torch.Tensor, next_tokens: NDArray[np.int64]) -> None:
        """See `Forward`."""
        cache, rows, device = self._cache, len(hidden), hidden.device
        cache.make_room(rows)
        start, end = cache.length, cache.length + rows
        seen = Span(0, end, None)
        if rows > 1:
            visible = torch.ones(rows, rows, dtype=torch.bool, device=device).tril()
            seen = span(self._model.config.shape, (0, end), visible, hidden.dtype)
        rope = self._rotary(torch.arange(start, end, device=device), hidden.dtype)
        output = self._model(self._embed(to_device(next_tokens, device)), hidden, rope, cache, seen)
        cache.length = end
        self._root = output[-1:]

    @torch.inference_mode()
    def root(self) -> torch.Tensor:
        """See `Forward`."""
        self._hidden, self._ancestors = self._root, np.zeros((1, 0), np.bool_)
        return self._model.logits(self._hidden)

    @torch.inference_mode()
    def expand(self, frontier: Frontier) -> torch.Tensor:
        """See `Forward`; the tree's rows lie behind the context."""
        cache, device, dtype = self._cache, self._hidden.device, self._hidden.dtype
        rows = len(frontier.rows)
        visible = seen_in_tree(self._ancestors, frontier)
        cache.make_room(visible.shape[1])
        seen = span(
            self._model.config.shape,
            (0, cache.length + visible.shape[1]),
            to_device(visible, device),
            dtype,
        )
        # Children of the root stand right behind the context.
        positions = torch.full((rows,), cache.length + frontier.depth - 1, device=device)
        hidden = self._hidden[to_device(frontier.above, device)]
        embedded = self._embed(to_device(frontier.tokens, device))
        self._hidden = self._model(embedded, hidden, self._rotary(positions, dtype), cache, seen)
        self._ancestors = visible
        return self._model.logits(self._hidden)


class CapturedLevels:
    """The passes captured, for all texts of a drafter: rows of a round, and levels of a tree.

    Narrowing the features (one product) and choosing the best children, whose number and
    temperature each round decides, are launched as they are. So are the rows of a long prompt.
    """

    def __init__(
        self, model: Eagle3Model, target: Target, rotary: Rotary, capture: BudgetedCapture
    ) -> None:
        self._model, self._rotary, self._dtype = model, rotary, target.dtype
        self._embed = Embedding(model, target)
        self.capture, self.device = capture, target.device
        shape = model.config.shape
        cache_shape = DraftCacheShape(layers=1, kv_heads=shape.kv_heads, head_dim=shape.head_dim)
        self.caches = SharedCaches(cache_shape, target.dtype, target.device, target)
        # The layer's output at the rows of the last answer, which the next level reads. One for
        # all texts, since each draft is made to its end before another is begun.
        self._hidden = self._new_hidden(BUCKETS[-1])
        self.extend = RowForwards("taking in a round's rows", self._extend, capture)
        self._expand = RowForwards("the draft of a level", self._level, capture)

    def begin(self, root: torch.Tensor) -> None:
        """Let the next level be the children of the root, whose output is [1, hidden]."""
        self._hidden[:1].copy_(root)

    def expand(self, place: Place, block: RowBlock, above: NDArray[np.int64]) -> torch.Tensor:
        """Logits [rows, draft_vocab] of nodes below the rows `above` of the last answer."""
        if block.rows > len(self._hidden):
            self._widen(block.rows)
        rows = block.rows
        hidden, logits = self._expand(place, block, to_device(above, self.device))
        self._hidden[:rows].copy_(hidden[:rows])
        return logits[:rows]

    def _extend(self, tables: RowTables, data: torch.Tensor, hidden: torch.Tensor) -> Tensors:
        """Output [1, hidden] and logits [1, draft_vocab] of the last row that is no padding."""
        output = self._run(tables, data, hidden)
        last = output.index_select(0, tables.tails[tables.owners[:1]].long() - 1)
        return last, self._model.logits(last)

    def _level(self, tables: RowTables, data: torch.Tensor, above: torch.Tensor) -> Tensors:
        output = self._run(tables, data, self._hidden.index_select(0, above))
        return output, self._model.logits(output)

    def _run(self, tables: RowTables, data: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        rope = self._rotary(tables.positions, self._dtype)
        cache = TableCache(data, tables)
        output: torch.Tensor = self._model(
            self._embed(tables.tokens), hidden, rope, cache, ALL_ROWS
        )
        return output

    def _new_hidden(self, rows: int) -> torch.Tensor:
        return torch.zeros(
            rows, self._model.config.shape.hidden, dtype=self._dtype, device=self.device
        )

    def _widen(self, rows: int) -> None:
        """Captured levels read the old tensor, so they have to be captured anew."""
        wider = self._new_hidden(2 * rows)
        wider[: len(self._hidden)] = self._hidden
        self._hidden = wider
        self._expand.forget()


class GraphedForward:
    """One text in a shared cache, over captured passes; a tree's rows are pending."""

    def __init__(self, captured: CapturedLevels) -> None:
        self._captured = captured
        self._place: Place | None = None
        self._root = (torch.empty(0), torch.empty(0))  # output and logits at the newest row
        self._ancestors = np.zeros((1, 0), np.bool_)  # of the last answer's rows

    @property
    def length(self) -> int:
        """See `Forward`."""
        return 0 if self._place is None else self._place.length

    def cut(self, tokens: int) -> None:
        """See `Forward`."""
        if self._place is not None:
            self._place.cut(tokens)

    @torch.inference_mode()
    def extend(self, hidden: torch.Tensor, next_tokens: NDArray[np.int64]) -> None:
        """See `Forward`."""
        rows = len(hidden)
        self.cut(self.length)  # what the last tree has left behind
        place = self._room(rows)
        visible = DenseVisible(np.tri(rows, dtype=np.bool_))
        block = RowBlock(place.sequence, next_tokens, np.arange(rows), visible)
        output, logits = self._captured.extend(place, block, hidden)
        place.cache.lengths[place.sequence] += rows
        self._root = output.clone(), logits.clone()  # the next rows overwrite them

    @torch.inference_mode()
    def root(self) -> torch.Tensor:
        """See `Forward`."""
        output, logits = self._root
        self.cut(self.length)
        self._ancestors = np.zeros((1, 0), np.bool_)
        self._captured.begin(output)
        return logits

    @torch.inference_mode()
    def expand(self, frontier: Frontier) -> torch.Tensor:
        """See `Forward`."""
        rows = len(frontier.rows)
        place = self._room(rows)
        visible = seen_in_tree(self._ancestors, frontier)
        offsets = np.full(rows, frontier.depth - 1)
        block = RowBlock(place.sequence, frontier.tokens, offsets, DenseVisible(visible))
        logits = self._captured.expand(place, block, frontier.above)
        place.cache.pending[place.sequence] += rows
        self._ancestors = visible
        return logits

    def _room(self, rows: int) -> Place:
        self._place = self._captured.caches.room(self, self._place, rows)
        return self._place


def seen_in_tree(ancestors: NDArray[np.bool_], frontier: Frontier) -> NDArray[np.bool_]:
    """Which of the tree's rows, [F, rows so far + F], the frontier's nodes see.

    ancestors  the same of the rows of the last answer
    """
    own = np.eye(len(frontier.rows), dtype=np.bool_)
    return np.concatenate((ancestors[frontier.above], own), axis=1)
