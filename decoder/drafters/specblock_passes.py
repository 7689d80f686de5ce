"""The forwards of one SpecBlock draft, over its cache (Shi et al., appendix A.2)."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from decoder.drafters.blocks import DraftCache, Rotary, Span, span
from decoder.drafters.specblock_model import SpecBlockModel, Wanted


class Drafting(Protocol):
    """What the forwards need of a drafter."""

    model: SpecBlockModel
    rotary: Rotary

    def embed(self, tokens: NDArray[np.int64]) -> torch.Tensor: ...


def add_prefix(
    drafter: Drafting, cache: DraftCache, conditions: torch.Tensor, embeddings: torch.Tensor
) -> None:
    """Append rows of the verified prefix to the cache, [rows, hidden] each."""
    model, count = drafter.model, len(conditions)
    cache.make_room(count)
    start, end = cache.length, cache.length + count
    rows = model.inputs(conditions, embeddings)[:, 0]
    visible = torch.ones(count, count, dtype=torch.bool, device=rows.device).tril()
    seen = span(model.config.shape, (0, end), visible, rows.dtype)
    positions = torch.arange(start, end, device=rows.device)
    rope = drafter.rotary(positions, rows.dtype)
    # Only keys and values are kept, so the last layer goes no further than one row.
    one = Wanted(positions[-1:] - start, Span(0, end, None))
    model(rows, positions - start, rope, cache, seen, one)
    cache.length = end


class Blocks:
    """A draft's forwards: the first block, then batches of further ones.

    Rows are numbered from the first block's first position; block b's are K * b on. Each
    sees the prefix, its own block up to itself, and on the path to it what its start saw.
    The first forward also runs the prefix rows that are not in the cache; what lies in the
    cache before its length stays as it is.
    """

    def __init__(
        self,
        drafter: Drafting,
        cache: DraftCache,
        conditions: torch.Tensor,
        embeddings: torch.Tensor,
    ) -> None:
        """conditions, embeddings: [R, hidden] of prefix rows, the bonus token's last."""
        self._drafter, self._cache = drafter, cache
        self._conditions, self._embeddings = conditions, embeddings
        self._length = drafter.model.config.block_length
        self._hidden = conditions[:0]
        self._visible = np.zeros((0, 0), np.bool_)
        self._positions = np.zeros(0, np.int64)
        self.logits = conditions[:0]  # of the last forward's block rows, [S * K, draft_vocab]
        self.ranks: torch.Tensor | None = None  # and its buckets, [S * K, 4]

    def first(self) -> NDArray[np.int64]:
        """Run the first block: its rows [1, K]."""
        model, cache, length = self._drafter.model, self._cache, self._length
        fused = model.inputs(self._conditions, self._embeddings)  # [R, K, hidden]
        rows = torch.cat((fused[:-1, 0], fused[-1]))
        known, device = len(fused) - 1, rows.device
        cache.make_room(len(rows))
        positions = torch.arange(cache.length, cache.length + len(rows), device=device)
        before = torch.arange(len(rows), device=device)
        before[known + 1 :] -= 1
        visible = torch.ones(len(rows), len(rows), dtype=torch.bool, device=device).tril()
        ends = (0, cache.length + len(rows))
        seen = span(model.config.shape, ends, visible, rows.dtype)
        rope = self._drafter.rotary(positions, rows.dtype)
        self._hidden = model(rows, before, rope, cache, seen)[known:]
        self._visible = np.tri(length, dtype=np.bool_)
        self._positions = cache.length + known + np.arange(length)
        return self._read(self._hidden)

    def more(self, starts: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Run one block from each of these rows [S], which proposed these tokens: rows [S, K]."""
        model, cache, length = self._drafter.model, self._cache, self._length
        blocks, known = len(starts), len(self._hidden)
        device = self._hidden.device
        conditions = self._hidden[torch.from_numpy(starts).to(device)]
        rows = model.inputs(conditions, self._drafter.embed(tokens)).flatten(0, 1)
        offsets = np.arange(length)
        before = np.maximum(offsets - 1, 0) + length * np.arange(blocks)[:, None]
        positions = self._positions[starts][:, None] + 1 + offsets
        own = np.kron(np.eye(blocks, dtype=np.bool_), np.tri(length, dtype=np.bool_))
        path = np.repeat(self._visible[starts], length, axis=0)
        visible = np.concatenate((path, own), axis=1)
        # Behind the prefix, whose last row is the first block's first.
        pending = len(self._conditions) - 1
        cache.make_room(pending + known + len(rows))
        ends = (0, cache.length + pending + known + len(rows))
        mask = torch.from_numpy(visible).to(device)
        seen = span(model.config.shape, ends, mask, rows.dtype)
        rope = self._drafter.rotary(torch.from_numpy(positions.ravel()).to(device), rows.dtype)
        index = torch.from_numpy(before.ravel()).to(device)
        hidden = model(rows, index, rope, cache, seen)
        self._hidden = torch.cat((self._hidden, hidden))
        self._visible = np.concatenate((np.pad(self._visible, ((0, 0), (0, len(rows)))), visible))
        self._positions = np.concatenate((self._positions, positions.ravel()))
        return self._read(hidden)

    def _read(self, hidden: torch.Tensor) -> NDArray[np.int64]:
        self.logits, self.ranks = self._drafter.model.read(hidden)
        first = len(self._hidden) - len(hidden)
        return np.arange(first, len(self._hidden)).reshape(-1, self._length)
