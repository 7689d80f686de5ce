"""The cache of one text's draft rows, which may be overwritten behind its context."""

from __future__ import annotations

import torch

from decoder.drafters.blocks import DraftShape, RowCache, Span
from decoder.model.attention import Scoring, attend, tail_mask

FIRST_CAPACITY = 256  # rows of a new cache


class DraftCache(RowCache):
    """The cache of one text: a tensor that grows by doubling.

    `data` is [layers, 2, 1, kv_heads, capacity, head_dim]. The first `length` rows are the
    context, after norm and rotation; rows after them last until others are written there.
    A forward writes its rows from `start` on.
    """

    def __init__(
        self, shape: DraftShape, layers: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        size = (layers, 2, 1, shape.kv_heads, FIRST_CAPACITY, shape.head_dim)
        self.data = torch.zeros(size, dtype=dtype, device=device)
        self.length = self.start = 0

    def make_room(self, rows: int) -> None:
        """Make room for `rows` rows after the context; all rows keep their values."""
        *planes, capacity, width = self.data.shape
        needed = self.length + rows
        if needed <= capacity:
            return
        grown = self.data.new_zeros(*planes, max(needed, 2 * capacity), width)
        grown[..., :capacity, :] = self.data
        self.data = grown

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        end = self.start + key.shape[1]
        self.data[layer, 0, 0, :, self.start : end] = key
        self.data[layer, 1, 0, :, self.start : end] = value

    def read(self, layer: int, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the keys and values in slots first..end, [1, kv_heads, keys, head_dim]."""
        return self.data[layer, 0, :, :, first:end], self.data[layer, 1, :, :, first:end]

    def attend(self, layer: int, query: torch.Tensor, seen: Span, scale: float) -> torch.Tensor:
        key, value = self.read(layer, seen.first, seen.end)
        return attend(query[None], key, value, seen.mask, Scoring(scale))[0]


def span(
    shape: DraftShape, ends: tuple[int, int], visible: torch.Tensor, dtype: torch.dtype
) -> Span:
    """The span of slots ends[0]..ends[1], whose last slots are masked by `visible`.

    visible  boolean [rows, tail]: whether a row sees each of the last slots
    dtype    of keys and queries
    """
    mask = tail_mask(visible, shape.group, visible.shape[1], dtype)
    return Span(ends[0], ends[1], mask)
