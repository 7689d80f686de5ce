"""The state of drafting sessions: waiting features, KV caches, and forwards over them.

A captured forward takes lengths, slots, positions and visibility from `RowTables`, as the
target's do. Padding rows write to a slot that is never read, and their results are cut off.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from weakref import WeakKeyDictionary, finalize

import torch

from costmodel.errors import InputError
from decoder.device import to_device
from decoder.drafters.base import DraftSession
from decoder.drafters.blocks import ALL_ROWS, Rope, Rotary, RowCache, Span
from decoder.model.attention import RowBlock, Scoring, Segment, attend, plan_segment, tail_mask
from decoder.model.kv_cache import CacheShape, KVCache
from decoder.model.runtime.capture import Capture, GraphedFunction, Tensors, bucket
from decoder.model.runtime.fused import TableAttention
from decoder.model.runtime.graphs import GraphShape
from decoder.model.runtime.tables import RowTables, needed_words
from decoder.model.target import CAPACITY_STEP, Target

WAITING_ROWS = 256  # features of plain rounds that are kept as the target gave them
HEADROOM = 256  # rows of a draft behind as many tokens as the target has reserved


class FeatureSession(DraftSession):
    """A session that takes in the target's features of committed rows before it drafts."""

    def __init__(self, drafter: str) -> None:
        """drafter: as a message names it, such as `an EAGLE-3 drafter`"""
        self._drafter_name = drafter
        self._waiting: list[torch.Tensor] = []

    @abstractmethod
    def take_in(self, features: torch.Tensor) -> None:
        """Take in the features [rows, width] of further committed rows."""

    def observe(self, emitted: Sequence[int], features: torch.Tensor | None) -> None:
        """Keep the features for the next draft. Raises InputError for None."""
        if features is None:
            raise InputError(f"{self._drafter_name} needs the target's features, and got none")
        self._waiting.append(features)
        if sum(len(part) for part in self._waiting) >= WAITING_ROWS:
            self.take_in_waiting()

    @torch.inference_mode()
    def take_in_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            self.take_in(torch.cat(waiting))


def check_observed(known: int, context: int) -> None:
    """Raise InputError unless the features of all `context` tokens but the last are known."""
    if known != context - 1:
        raise InputError(
            f"the drafter has features of {known} tokens and the context has {context}",
            hint="Every round must be observed, a plain step too.",
        )


class SharedCaches:
    """Sequences of one cache that outlives the sessions, for captured forwards.

    A captured forward belongs to a cache's tensor, and serves all its sequences. So the cache
    has room for as many texts and tokens as the target has reserved. A session that outgrows it
    moves to one of twice the size. A sequence becomes free when its session is collected.
    """

    def __init__(
        self, shape: CacheShape, dtype: torch.dtype, device: torch.device, target: Target | None
    ) -> None:
        """target: the model whose texts are drafted, or None if unknown."""
        self._place, self._target = (shape, dtype, device), target
        self._cache: KVCache | None = None
        self._free: list[int] = []

    def take(self, text: PlacedText, tokens: int) -> tuple[KVCache, int]:
        """A cache with room for so many tokens, and the number of a free sequence in it."""
        reserved = None if self._target is None else self._target.cache
        sequences = 1 if reserved is None else reserved.sequences
        needed = max(tokens, 0 if reserved is None else reserved.capacity + HEADROOM)
        cache = self._cache
        fits = cache is not None and cache.capacity >= needed and cache.sequences == sequences
        if cache is None or not fits or not self._free:
            if cache is not None and cache.capacity < needed:
                needed = max(needed, 2 * cache.capacity)
            shape, dtype, device = self._place
            capacity = -(-needed // CAPACITY_STEP) * CAPACITY_STEP
            cache = self._cache = KVCache(
                shape, capacity=capacity, sequences=sequences, dtype=dtype, device=device
            )
            self._free = list(reversed(range(sequences)))
        sequence = self._free.pop()
        finalize(text, self._free.append, sequence).atexit = False
        return cache, sequence


class PlacedText:
    """One text's sequence of shared caches, which it has from its first rows on."""

    cache: KVCache
    sequence = -1

    def __init__(self, caches: SharedCaches) -> None:
        self._caches = caches

    @property
    def length(self) -> int:
        return 0 if self.sequence < 0 else self.cache.lengths[self.sequence]

    def cut(self, tokens: int) -> None:
        """Forget all pending rows, and the committed ones after the first `tokens`."""
        if self.sequence >= 0:
            self.cache.cut(tokens, self.sequence)

    @torch.inference_mode()
    def make_room(self, rows: int) -> None:
        """Make room for `rows` more rows; if needed, in another sequence with the same contents."""
        if self.sequence < 0:
            self.cache, self.sequence = self._caches.take(self, rows)
            self.cut(0)
            return
        before, old = self.cache, self.sequence
        if before.end(old) + rows > before.capacity:
            self.cache, self.sequence = self._caches.take(self, before.end(old) + rows)
            self.cache.copy_from(before, old, self.sequence)


CAPTURED_ROWS = 256  # more rows are those of a prompt: rare, and of any number


class PlacedRows(RowCache):
    """The rows of a block in a forward that is not captured."""

    def __init__(self, cache: KVCache, block: RowBlock, group: int) -> None:
        """group: query heads of a KV head"""
        self.cache, self.block, self._group = cache, block, group
        self._prefix = cache.lengths[block.sequence]
        self._end = cache.end(block.sequence) + block.rows
        self.tokens = to_device(block.tokens, cache.device)
        self.positions = to_device(block.offsets, cache.device) + self._prefix
        self.last = slice(block.rows - 1, block.rows)

    def rope(self, rotary: Rotary, dtype: torch.dtype) -> Rope:
        last = self._prefix + int(self.block.offsets.max())  # on the host: nothing waits
        return rotary.looked_up(self.positions, last + 1, dtype)

    @cached_property
    def _segment(self) -> Segment:
        block, visible = self.block, self.block.mask()
        seen = None if visible is None or visible.all() else to_device(visible, self.cache.device)
        rows = slice(0, block.rows)
        return plan_segment(self.cache, block.sequence, rows, seen, self._group)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._segment.store(layer, key[None], value[None])

    def attend(self, layer: int, query: torch.Tensor, seen: Span, scale: float) -> torch.Tensor:
        if seen is ALL_ROWS:
            return self._segment.attend(layer, query[None], Scoring(scale))[0]
        key, value = (part[:, :, seen.first : seen.end] for part in self._segment.read[layer])
        return attend(query[None], key, value, seen.mask, Scoring(scale))[0]

    def span(self, window: int | None, causal: bool) -> Span:
        """The last `window` tokens, if not causal as many ahead; None: all that the block says."""
        if window is None or (not causal and self._end <= window):
            return ALL_ROWS
        first = max(0, self._prefix + 1 - window)
        ahead = torch.arange(first, self._end, device=self.cache.device) - self.positions[:, None]
        visible = ahead.abs() < window
        if causal:
            visible &= ahead <= 0
        mask = tail_mask(visible, self._group, visible.shape[1], self.cache.dtype)
        return Span(first, self._end, mask)


class TableRows(RowCache):
    """The rows of a captured forward, whose slots are in tables; as `PlacedRows`."""

    def __init__(self, tables: RowTables, data: torch.Tensor, group: int) -> None:
        self._attention = TableAttention(data, tables)
        self._tables, self._group = tables, group
        self.tokens, self.positions = tables.tokens, tables.positions

    @property
    def last(self) -> torch.Tensor:
        """The number [1] of the last row before the padding."""
        return self._tables.tails[self._tables.owners[:1]].long() - 1

    def rope(self, rotary: Rotary, dtype: torch.dtype) -> Rope:
        return rotary(self.positions, dtype)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._attention.store(layer, key, value)

    def attend(self, layer: int, query: torch.Tensor, seen: Span, scale: float) -> torch.Tensor:
        if seen is ALL_ROWS:
            return self._attention.attend_stored(layer, query.transpose(0, 1), scale).transpose(
                0, 1
            )
        place = self._tables.owners[:1], slice(None), seen.slots
        key, value = (part[place].transpose(0, 1)[None] for part in self._attention.data[layer])
        return attend(query[None], key, value, seen.mask, Scoring(scale))[0]

    def span(self, window: int | None, causal: bool) -> Span:
        if window is None:
            return ALL_ROWS
        tables = self._tables
        owner, rows = tables.owners[:1], tables.rows
        prefix = tables.prefixes[owner].long()
        slots = prefix - (window - 1) + torch.arange(window - 1 + rows, device=prefix.device)
        ahead = slots - tables.positions[:, None]  # a row's position is its slot
        visible = (slots >= 0) & (slots < prefix + tables.tails[owner]) & (ahead.abs() < window)
        if causal:
            visible &= ahead <= 0
        mask = tail_mask(visible, self._group, visible.shape[1], self._attention.data.dtype)
        return Span(0, 0, mask, slots.clamp_min(0))


DraftRows = PlacedRows | TableRows

_Bucket = tuple[RowTables, Tensors, GraphedFunction]  # its function reads the other two


class RowForwards:
    """One kind of forward, for all sessions of a drafter.

    With a capture it is captured for each bucket of rows when first needed, within the target's
    memory budget for graphs. If that fails, the same function runs uncaptured on the same padded
    rows, with one warning a bucket. More than `CAPTURED_ROWS` rows run without padding.
    """

    def __init__(
        self, name: str, body: Callable[..., Tensors], group: int, capture: Capture | None
    ) -> None:
        """
        name   of the forward, for the warning
        body   of rows and inputs [rows, ...]; as `GraphedFunction` asks, where it is captured
        group  query heads of a KV head
        """
        self._name, self._body, self._group, self._capture = name, body, group, capture
        self._buckets: WeakKeyDictionary[KVCache, dict[GraphShape, _Bucket]] = WeakKeyDictionary()

    def forget(self) -> None:
        self._buckets.clear()

    @torch.inference_mode()
    def __call__(self, cache: KVCache, block: RowBlock, *inputs: torch.Tensor) -> Tensors:
        """The outputs, padded where captured, of inputs [rows, ...]; overwritten by the next."""
        rows, capture, data = block.rows, self._capture, cache.data
        padded = bucket(rows)
        if capture is None or padded is None or rows > CAPTURED_ROWS:
            return self._body(PlacedRows(cache, block, self._group), *inputs)
        buckets = self._buckets.setdefault(cache, {})
        shape = GraphShape(rows=padded, words=needed_words(cache, [block]))
        if shape not in buckets:
            tables = RowTables(shape.rows, cache.sequences, shape.words, data.device)
            fixed = tuple(one.new_zeros((shape.rows, *one.shape[1:])) for one in inputs)
            captured = partial(self._body, TableRows(tables, data, self._group), *fixed)
            buckets[shape] = tables, fixed, GraphedFunction(captured, capture)
        tables, fixed, function = buckets[shape]
        tables.fill(cache, [block])
        for static, tensor in zip(fixed, inputs, strict=True):
            static[:rows].copy_(tensor)
        before = function.refused
        outputs = function()
        if before is None and function.refused is not None:
            note = f"{self._name} of {padded} rows is not captured: {function.refused}"
            if note not in capture.notes:  # another cache may have failed the same way
                capture.notes.append(note)
        return outputs
