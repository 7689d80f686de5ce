"""What attention needs to know of each row, as tensors that a captured forward reads.

Nothing here is a number that Python knows when the forward is captured: lengths, slots and
ancestors are written into the same tensors before every replay, with one copy to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from costmodel.errors import InputError
from decoder.ancestors import WORD
from decoder.kv_cache import KVCache
from decoder.runtime.base import RowBlock
from decoder.runtime.triton_support import kernels_usable


def needed_words(cache: KVCache, blocks: Sequence[RowBlock]) -> int:
    """Words a row for the longest tail (pending and new rows), a power of two.

    Powers of two, so that few graphs are captured for one bucket of rows.
    """
    longest = max(cache.pending[block.sequence] + block.rows for block in blocks)
    words = -(-longest // WORD)
    return 1 << (words - 1).bit_length()


class RowTables:
    """Static tensors about the rows of a forward, and their one-copy filling.

    tokens, positions, slots, owners  int64 [rows]: the owner is the row's sequence in the
                          cache, the slot where its key and value go
    starts, counts        int32 [sequences]: a sequence's first row, and how many it has
    prefixes, tails       int32 [sequences]: committed tokens, and pending plus new rows
    bits                  int32 [rows, words]: which of its sequence's tail a row sees
    """

    def __init__(self, rows: int, sequences: int, words: int, device: torch.device) -> None:
        sizes = (8 * rows, 4 * sequences, rows * words)
        self._host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        wide, few, bits = self._device.split(sizes)
        self.tokens, self.positions, self.slots, self.owners = wide.view(torch.int64).view(4, rows)
        self.starts, self.counts, self.prefixes, self.tails = few.view(4, sequences)
        self.bits = bits.view(rows, words)
        wide_np, few_np, bits_np = np.split(self._host.numpy(), np.cumsum(sizes)[:2])
        self._wide: NDArray[np.int64] = wide_np.view(np.int64).reshape(4, rows)
        self._few: NDArray[np.int32] = few_np.reshape(4, sequences)
        self._bits: NDArray[np.int32] = bits_np.reshape(rows, words)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    @property
    def rows(self) -> int:
        return len(self.tokens)

    def fill(self, cache: KVCache, blocks: Sequence[RowBlock]) -> None:
        """Describe these blocks, end to end, behind what the cache holds of each sequence.

        Rows left over are padding: they count as rows of the last block, see its first
        tail key alone, and write to the one slot behind its rows, which is never committed.
        Raises InputError for more rows than the tables hold.
        """
        if sum(block.rows for block in blocks) > self.rows:
            raise InputError(f"tables of {self.rows} rows cannot hold so many")
        if self._copied is not None:
            self._copied.synchronize()  # the copy of the round before has long been made
        self._few[:] = 0
        first = 0
        for block in blocks:
            self._describe(cache, block, slice(first, first + block.rows))
            first += block.rows
        self._pad(cache, blocks[-1], slice(first, self.rows))
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _describe(self, cache: KVCache, block: RowBlock, rows: slice) -> None:
        sequence, end = block.sequence, cache.end(block.sequence)
        length = cache.lengths[sequence]
        self._wide[0, rows] = block.tokens
        self._wide[1, rows] = block.offsets + length
        self._wide[2, rows] = np.arange(end, end + block.rows)
        self._wide[3, rows] = sequence
        self._few[:, sequence] = rows.start, block.rows, length, end + block.rows - length
        if block.visible is None:
            self._bits[rows] = 0
            self._bits[rows, 0] = 1
        else:
            self._bits[rows] = block.visible.bits(self._bits.shape[1])

    def _pad(self, cache: KVCache, block: RowBlock, rows: slice) -> None:
        sequence = block.sequence
        self._wide[0, rows] = block.tokens[-1]
        self._wide[1, rows] = cache.lengths[sequence]
        self._wide[2, rows] = cache.end(sequence) + block.rows
        self._wide[3, rows] = sequence
        self._few[1, sequence] += rows.stop - rows.start
        self._bits[rows] = 0
        self._bits[rows, 0] = 1


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Where a layer's new keys and values go.

    keys, values   [sequences, kv_heads, slots, head_dim]
    owners, slots  int64 [rows]
    """

    keys: torch.Tensor
    values: torch.Tensor
    owners: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class TablePlan:
    """Attention of the rows that some tables describe, over a cache's tensor.

    data  [layers, 2, sequences, kv_heads, slots, head_dim]
    """

    data: torch.Tensor
    tables: RowTables

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Store the rows' keys and values, and attend: see `AttentionPlan`."""
        cache = self.layer(layer)
        cache.keys[cache.owners, :, cache.slots] = key[0].transpose(0, 1)
        cache.values[cache.owners, :, cache.slots] = value[0].transpose(0, 1)
        return self.attend_stored(layer, query[0].transpose(0, 1), scale)[None]

    def layer(self, layer: int) -> LayerCache:
        """Where the rows' keys and values of a layer go."""
        keys, values = self.data[layer]
        return LayerCache(keys, values, self.tables.owners, self.tables.slots)

    def attend_stored(self, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention of rows whose keys and values are stored; [rows, heads, head_dim] each way."""
        keys, values = self.data[layer]
        attend = reference_table_attention
        if kernels_usable(query.device) and query.dtype != torch.float64:
            from decoder.runtime.triton_attention import table_attention as attend
        return attend(query, keys, values, self.tables, scale)


def reference_table_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: RowTables,
    scale: float,
) -> torch.Tensor:
    """Tree attention from tables in plain PyTorch operations, of fixed shapes.

    Reads every slot of the cache under a mask, so it is for tests and for want of kernels.

    query         [rows, heads, head_dim]
    keys, values  [sequences, kv_heads, slots, head_dim]
    returns       [rows, heads, head_dim]
    """
    rows, heads, width = query.shape
    kv_heads, slots = keys.shape[1:3]
    accurate = torch.promote_types(query.dtype, torch.float32)
    prefix = tables.prefixes[tables.owners].long()[:, None]  # [rows, 1]
    place = torch.arange(slots, device=query.device)[None] - prefix  # [rows, slots] in the tail
    inside = (place >= 0) & (place < tables.tails[tables.owners][:, None])
    word = (place // WORD).clamp(0, tables.bits.shape[1] - 1)
    bit = (tables.bits.gather(1, word) >> (place % WORD).int()) & 1
    seen = (place < 0) | (inside & (bit == 1))
    packed = query.view(rows, kv_heads, heads // kv_heads, width)
    scores = torch.einsum("rhgd,rhsd->rhgs", packed, keys[tables.owners]).to(accurate) * scale
    weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
    mixed = torch.einsum("rhgs,rhsd->rhgd", weights.to(values.dtype), values[tables.owners])
    return mixed.reshape(rows, heads, width)
