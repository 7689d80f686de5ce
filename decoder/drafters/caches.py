"""Where the keys and values of a drafter's sessions lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol
from weakref import finalize

import torch

from decoder.kv_cache import CacheShape, KVCache
from decoder.target import CAPACITY_STEP, Target

HEADROOM = 256  # rows of a draft behind as many tokens as the target has reserved


@dataclass(frozen=True, slots=True)
class Place:
    """One session's sequence of a cache."""

    cache: KVCache
    sequence: int

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self.cache.lengths[self.sequence]

    @property
    def end(self) -> int:
        """Committed and pending ones."""
        return self.cache.end(self.sequence)

    def cut(self, tokens: int) -> None:
        """Forget all pending rows, and what is committed behind the first tokens."""
        self.cache.lengths[self.sequence] = min(self.length, tokens)
        self.cache.pending[self.sequence] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCacheShape:
    """The shape of a drafter's keys and values that has no `ModelArchitecture`."""

    layers: int
    kv_heads: int
    head_dim: int


class Caches(Protocol):
    """Gives sessions their places."""

    def room(self, session: object, place: Place | None, rows: int) -> Place:
        """A place with room for `rows` more rows: this one, or another that holds the same.

        None is a session without one; what it gets is empty.
        """


class OwnCaches:
    """A cache of its own for each session, a quarter larger than it must be."""

    def __init__(self, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device

    @torch.inference_mode()
    def room(self, session: object, place: Place | None, rows: int) -> Place:
        """See `Caches`."""
        needed = rows if place is None else place.end + rows
        if place is not None and needed <= place.cache.capacity:
            return place
        found = Place(
            KVCache(
                self._shape,
                capacity=needed + max(needed // 4, 256),
                sequences=1,
                dtype=self._dtype,
                device=self._device,
            ),
            0,
        )
        if place is not None:
            found.cache.copy_from(place.cache, place.sequence, 0)
        return found


class SharedCaches:
    """Sequences of one cache that outlives the sessions, for captured forwards.

    A captured forward belongs to a cache's tensor, and serves all sequences of it. So the
    cache is made for as many texts and tokens as the target has reserved; the next texts
    use it again, and only a session that outgrows it all the same moves to one of twice the
    size. A sequence is free when its session is gone.
    """

    def __init__(
        self,
        shape: CacheShape,
        dtype: torch.dtype,
        device: torch.device,
        target: Target | None,
    ) -> None:
        """target: whose texts are drafted; None where that is not known."""
        self._shape, self._dtype, self._device = shape, dtype, device
        self._target = target
        self._cache: KVCache | None = None
        self._free: list[int] = []

    @torch.inference_mode()
    def room(self, session: object, place: Place | None, rows: int) -> Place:
        """See `Caches`."""
        if place is not None and place.end + rows <= place.cache.capacity:
            return place
        found = self._take(session, rows if place is None else place.end + rows)
        if place is None:
            found.cut(0)
        else:
            found.cache.copy_from(place.cache, place.sequence, found.sequence)
        return found

    def _take(self, session: object, tokens: int) -> Place:
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
        return Place(cache, sequence)
