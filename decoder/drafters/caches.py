"""The state of drafting sessions: waiting features, KV caches, and captured forwards over them.

A captured forward takes lengths, slots, positions and visibility from `RowTables`, as the
target's do. Padding rows write to a slot that is never read, and their results are cut off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary, finalize

import torch

from costmodel.errors import InputError
from decoder.drafters.blocks import RowCache, Span
from decoder.model.attention import RowBlock, attend, tail_mask
from decoder.model.kv_cache import CacheShape, KVCache
from decoder.model.runtime.capture import BudgetedCapture, GraphedFunction, Tensors, bucket
from decoder.model.runtime.fused import TablePlan
from decoder.model.runtime.graphs import GraphShape
from decoder.model.runtime.tables import RowTables, needed_words
from decoder.model.target import CAPACITY_STEP, Target

WAITING_ROWS = 256  # features of plain rounds that are kept as the target gave them
HEADROOM = 256  # rows of a draft behind as many tokens as the target has reserved


@dataclass(frozen=True, slots=True)
class CachePlace:
    """The sequence of a cache that belongs to one session."""

    cache: KVCache
    sequence: int

    @property
    def length(self) -> int:
        """The number of committed tokens."""
        return self.cache.lengths[self.sequence]

    @property
    def end(self) -> int:
        """The number of committed and pending tokens."""
        return self.cache.end(self.sequence)

    def cut(self, tokens: int) -> None:
        """Forget all pending rows, and the committed ones after the first `tokens`."""
        self.cache.cut(tokens, self.sequence)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCacheShape:
    """The shape of the keys and values of a drafter without a `ModelArchitecture`."""

    layers: int
    kv_heads: int
    head_dim: int


class WaitingFeatures:
    """The target's features of committed rows that a session has not taken in yet.

    drafter  as a message names it, such as `an EAGLE-3 drafter`
    """

    def __init__(self, drafter: str) -> None:
        self._drafter = drafter
        self._parts: list[torch.Tensor] = []

    @property
    def many(self) -> bool:
        """Whether to take them in before the next draft, so that few are kept."""
        return sum(len(part) for part in self._parts) >= WAITING_ROWS

    def add(self, features: torch.Tensor | None) -> None:
        """Keep the features [rows, width] of further rows. Raises InputError for None."""
        if features is None:
            raise InputError(f"{self._drafter} needs the target's features, and got none")
        self._parts.append(features)

    def take(self) -> torch.Tensor | None:
        """All of them [rows, width], which then wait no more; None if there are none."""
        features = torch.cat(self._parts) if self._parts else None
        self.clear()
        return features

    def clear(self) -> None:
        self._parts.clear()


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
    has room for as many texts and tokens as the target has reserved, and later texts use it
    again. A session that outgrows it moves to one of twice the size. A sequence becomes free
    when its session is garbage-collected.
    """

    def __init__(
        self, shape: CacheShape, dtype: torch.dtype, device: torch.device, target: Target | None
    ) -> None:
        """target: the model whose texts are drafted, or None if unknown."""
        self._shape, self._dtype, self._device = shape, dtype, device
        self._target = target
        self._cache: KVCache | None = None
        self._free: list[int] = []

    @torch.inference_mode()
    def room(self, session: object, place: CachePlace | None, rows: int) -> CachePlace:
        """A place with room for `rows` more rows: this one, or another with the same contents.

        A session without a place (None) gets an empty one.
        """
        if place is not None and place.end + rows <= place.cache.capacity:
            return place
        free = self._take(session, rows if place is None else place.end + rows)
        if place is None:
            free.cut(0)
        else:
            free.cache.copy_from(place.cache, place.sequence, free.sequence)
        return free

    def _take(self, session: object, tokens: int) -> CachePlace:
        reserved = None if self._target is None else self._target.cache
        sequences = 1 if reserved is None else reserved.sequences
        needed = max(tokens, 0 if reserved is None else reserved.capacity + HEADROOM)
        cache = self._cache
        fits = cache is not None and cache.capacity >= needed and cache.sequences == sequences
        if cache is None or not fits or not self._free:
            if cache is not None and cache.capacity < needed:
                needed = max(needed, 2 * cache.capacity)
            cache = self._cache = KVCache(
                self._shape,
                capacity=-(-needed // CAPACITY_STEP) * CAPACITY_STEP,
                sequences=sequences,
                dtype=self._dtype,
                device=self._device,
            )
            self._free = list(reversed(range(sequences)))
        sequence = self._free.pop()
        finalize(session, self._free.append, sequence).atexit = False
        return CachePlace(cache, sequence)


class PlacedText:
    """One text's sequence of shared caches, which it has from its first rows on."""

    def __init__(self, caches: SharedCaches) -> None:
        self._caches = caches
        self._place: CachePlace | None = None

    @property
    def length(self) -> int:
        return 0 if self._place is None else self._place.length

    def cut(self, tokens: int) -> None:
        if self._place is not None:
            self._place.cut(tokens)

    def room(self, rows: int) -> CachePlace:
        """The text's place, with room for `rows` more rows."""
        self._place = self._caches.room(self, self._place, rows)
        return self._place


CAPTURED_ROWS = 256  # more rows are those of a prompt: rare, and of any number

# A function of tables, a cache's tensor and inputs [rows, ...]; what `GraphedFunction` asks holds.
Body = Callable[..., Tensors]


_Bucket = tuple[RowTables, Tensors, GraphedFunction]  # its function reads the other two


class RowForwards:
    """One kind of forward, for all sessions of a drafter.

    It is captured for each bucket of rows when first needed, within the target's memory budget
    for graphs. If that fails, the same function runs uncaptured on the same padded rows, with
    one warning a bucket. More than `CAPTURED_ROWS` rows run uncaptured and without padding.
    """

    def __init__(self, name: str, body: Body, capture: BudgetedCapture) -> None:
        """name: of the forward, for the warning"""
        self._name, self._body, self._capture = name, body, capture
        self._buckets: WeakKeyDictionary[KVCache, dict[GraphShape, _Bucket]]
        self._buckets = WeakKeyDictionary()

    def forget(self) -> None:
        """Drop all captures."""
        self._buckets.clear()

    @torch.inference_mode()
    def __call__(self, place: CachePlace, block: RowBlock, *inputs: torch.Tensor) -> Tensors:
        """The outputs of the padded rows, which the next call overwrites.

        block   the rows that follow those of the place's sequence
        inputs  [rows, ...] each, without padding
        """
        cache, rows = place.cache, block.rows
        words = needed_words(cache, [block])
        padded = bucket(rows) if rows <= CAPTURED_ROWS else None
        if padded is None:
            tables = RowTables(rows, cache.sequences, words, cache.data.device)
            tables.fill(cache, [block])
            return self._body(tables, cache.data, *inputs)
        buckets = self._buckets.setdefault(cache, {})
        shape = GraphShape(rows=padded, words=words)
        if shape not in buckets:
            buckets[shape] = self._new(cache, shape, inputs)
        tables, fixed, function = buckets[shape]
        tables.fill(cache, [block])
        for static, tensor in zip(fixed, inputs, strict=True):
            static[:rows].copy_(tensor)
        before = function.refused
        outputs = function()
        if before is None and function.refused is not None:
            note = f"{self._name} of {padded} rows is not captured: {function.refused}"
            if note not in self._capture.notes:  # another cache may have failed the same way
                self._capture.notes.append(note)
        return outputs

    def _new(self, cache: KVCache, shape: GraphShape, inputs: Tensors) -> _Bucket:
        data, body = cache.data, self._body
        tables = RowTables(shape.rows, cache.sequences, shape.words, data.device)
        fixed = tuple(
            torch.zeros((shape.rows, *one.shape[1:]), dtype=one.dtype, device=data.device)
            for one in inputs
        )
        return tables, fixed, GraphedFunction(lambda: body(tables, data, *fixed), self._capture)


@dataclass(frozen=True, slots=True)
class Window(Span):
    """A span of some slots of a sequence, which are gathered.

    slots  int64 [keys], 0 or more; the mask is over all of these
    """

    slots: torch.Tensor


ALL_ROWS = Span(0, 0, None)  # the whole prefix, and the tail under the tables' bits


class TableCache(RowCache):
    """A shared cache in a captured forward: the slots of its rows are in the tables."""

    length = 0  # unused, as are the slots that layers name

    def __init__(self, data: torch.Tensor, tables: RowTables) -> None:
        self._plan = TablePlan(data, tables)
        self._tables = tables

    def write(self, layer: int, start: int, key: torch.Tensor, value: torch.Tensor) -> None:
        cache = self._plan.layer(layer)
        cache.keys[cache.owners, :, cache.slots] = key.transpose(0, 1)
        cache.values[cache.owners, :, cache.slots] = value.transpose(0, 1)

    def attend(self, layer: int, query: torch.Tensor, seen: Span, scale: float) -> torch.Tensor:
        if not isinstance(seen, Window):
            return self._plan.attend_stored(layer, query.transpose(0, 1), scale).transpose(0, 1)
        cache = self._plan.layer(layer)
        owner = cache.owners[:1]
        keys = cache.keys[owner, :, seen.slots].transpose(0, 1)[None]
        values = cache.values[owner, :, seen.slots].transpose(0, 1)[None]
        return attend(query[None], keys, values, seen.mask, scale)[0]

    def window(self, width: int, causal: bool, group: int, dtype: torch.dtype) -> Window:
        """The span of rows that each see the last `width` tokens, themselves included.

        If not causal, they see as many tokens ahead. `group` query heads share a KV head.
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
