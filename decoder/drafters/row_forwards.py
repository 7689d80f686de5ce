"""A drafter's forwards over rows of a shared cache, captured once a bucket of rows.

Lengths, slots, positions and visibility come from `RowTables`, as in the target's captured
forwards; padding rows write to a slot that is never read, and their results are cut off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from decoder.attention import attend, tail_mask
from decoder.drafters.blocks import Span
from decoder.drafters.caches import Place
from decoder.kv_cache import KVCache
from decoder.runtime.base import RowBlock
from decoder.runtime.buckets import bucket
from decoder.runtime.capture import BudgetedCapture
from decoder.runtime.functions import GraphedFunction, Tensors
from decoder.runtime.graphs import GraphShape
from decoder.runtime.tables import RowTables, TablePlan, needed_words

CAPTURED_ROWS = 256  # more are those of a prompt: seldom, and of any number

# Of tables, a cache's tensor and inputs [rows, ...] to outputs; as GraphedFunction asks for.
Body = Callable[..., Tensors]


@dataclass(frozen=True, slots=True)
class _Bucket:
    tables: RowTables
    inputs: Tensors
    function: GraphedFunction


class RowForwards:
    """One kind of forward, for all sessions of a drafter.

    It is captured for a bucket of rows when first needed, within the budget that the target
    shares. Where that fails, the same function runs uncaptured on the same padded rows, which
    is said once; so it does, without padding, for more than `CAPTURED_ROWS` rows.
    """

    def __init__(self, name: str, body: Body, capture: BudgetedCapture) -> None:
        """name: what the forward does, for the warning."""
        self._name, self._body, self._capture = name, body, capture
        self._buckets: WeakKeyDictionary[KVCache, dict[GraphShape, _Bucket]]
        self._buckets = WeakKeyDictionary()

    def shapes(self, cache: KVCache) -> tuple[GraphShape, ...]:
        """The buckets that were needed for a cache."""
        return tuple(self._buckets.get(cache, {}))

    def forget(self) -> None:
        """Drop what was captured."""
        self._buckets.clear()

    @torch.inference_mode()
    def __call__(self, place: Place, block: RowBlock, *inputs: torch.Tensor) -> Tensors:
        """Outputs of the padded rows; the next call overwrites them.

        block   rows behind those of its sequence, which is the place's
        inputs  [rows, ...] each, of the rows that are not padding
        """
        cache, rows = place.cache, block.rows
        padded = bucket(rows) if rows <= CAPTURED_ROWS else None
        if padded is None:
            tables = RowTables(rows, cache.sequences, _words(cache, block), cache.data.device)
            tables.fill(cache, [block])
            return self._body(tables, cache.data, *inputs)
        known = self._buckets.setdefault(cache, {})
        shape = GraphShape(rows=padded, words=_words(cache, block))
        if shape not in known:
            known[shape] = self._new(cache, shape, inputs)
        step = known[shape]
        step.tables.fill(cache, [block])
        for static, given in zip(step.inputs, inputs, strict=True):
            static[:rows].copy_(given)
        before = step.function.refused
        outputs = step.function()
        if before is None and step.function.refused is not None:
            self._note(f"{self._name} of {padded} rows is not captured: {step.function.refused}")
        return outputs

    def _note(self, note: str) -> None:
        if note not in self._capture.notes:  # another cache may have met with the same
            self._capture.notes.append(note)

    def _new(self, cache: KVCache, shape: GraphShape, inputs: Tensors) -> _Bucket:
        data, body = cache.data, self._body
        tables = RowTables(shape.rows, cache.sequences, shape.words, data.device)
        fixed = tuple(
            torch.zeros((shape.rows, *given.shape[1:]), dtype=given.dtype, device=data.device)
            for given in inputs
        )
        return _Bucket(
            tables, fixed, GraphedFunction(lambda: body(tables, data, *fixed), self._capture)
        )


def _words(cache: KVCache, block: RowBlock) -> int:
    return needed_words(cache, [block])


@dataclass(frozen=True, slots=True)
class Window(Span):
    """Some slots of a sequence, which are looked up, in place of all of them.

    slots  int64 [keys], no smaller than 0; the mask is over all of these
    """

    slots: torch.Tensor


ALL_ROWS = Span(0, 0, None)  # the whole prefix, and of the tail what the tables' bits say


class TableCache:
    """A shared cache as the layers of a captured forward see it; like a `DraftCache`."""

    length = 0  # where rows go is in the tables, whatever slot a layer names

    def __init__(self, data: torch.Tensor, tables: RowTables) -> None:
        self._plan = TablePlan(data, tables)
        self._tables = tables

    def write(self, layer: int, start: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put rows [kv_heads, rows, head_dim] each where the tables say."""
        cache = self._plan.layer(layer)
        cache.keys[cache.owners, :, cache.slots] = key.transpose(0, 1)
        cache.values[cache.owners, :, cache.slots] = value.transpose(0, 1)

    def attend(self, layer: int, query: torch.Tensor, seen: Span, scale: float) -> torch.Tensor:
        """Attention of stored rows, [heads, rows, head_dim] each way."""
        if not isinstance(seen, Window):
            return self._plan.attend_stored(layer, query.transpose(0, 1), scale).transpose(0, 1)
        cache = self._plan.layer(layer)
        owner = cache.owners[:1]
        keys = cache.keys[owner, :, seen.slots].transpose(0, 1)[None]
        values = cache.values[owner, :, seen.slots].transpose(0, 1)[None]
        return attend(query[None], keys, values, seen.mask, scale)[0]

    def window(self, width: int, causal: bool, group: int, dtype: torch.dtype) -> Window:
        """What rows of one sequence see that look back over `width` tokens, themselves included.

        Without causality they look as far ahead. `group` query heads share a KV head.
        """
        tables = self._tables
        owner, rows = tables.owners[:1], tables.rows
        prefix = tables.prefixes[owner].long()
        slots = prefix - (width - 1) + torch.arange(width - 1 + rows, device=prefix.device)
        ahead = slots - tables.positions[:, None]  # a row's position is its slot
        visible = (slots >= 0) & (slots < prefix + tables.tails[owner]) & (ahead.abs() < width)
        if causal:
            visible &= ahead <= 0
        mask = tail_mask(visible, group, visible.shape[1], dtype)
        return Window(0, 0, mask, slots.clamp_min(0))
