"""Row tables: lengths, cache slots and ancestors of a forward's rows, as static tensors.

A captured forward reads them on the device, so one capture serves every context and tree. They
are refilled before each replay with one copy to the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from costmodel.errors import InputError
from decoder.model.attention import RowBlock
from decoder.model.kv_cache import KVCache
from decoder.tree.draft_tree import WORD, pack_bits


def needed_words(cache: KVCache, blocks: Sequence[RowBlock]) -> int:
    """Words of ancestor bits for the longest tail (pending and new rows)."""
    return whole_words(max(cache.pending[block.sequence] + block.rows for block in blocks))


def whole_words(bits: int) -> int:
    """The words of so many bits: a power of two, so that few graphs are captured."""
    return 1 << (-(-bits // WORD) - 1).bit_length()


class RowTables:
    """Static tensors that describe the rows of a forward.

    tokens, positions     int64 [rows]
    slots, owners         int64 [rows]: the cache slot of a row's key and value, and its sequence
    starts, counts        int32 [sequences]: a sequence's first row, and its number of rows
    prefixes, tails       int32 [sequences]: committed tokens, and pending plus new rows
    bits                  int32 [rows, words]: the tail keys that a row sees, a bit each
    """

    def __init__(self, rows: int, sequences: int, words: int, device: torch.device) -> None:
        sizes = (8 * rows, 4 * sequences, rows * words)
        self._host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        wide, few, bits = self._device.split(sizes)
        self.tokens, self.positions, self.slots, self.owners = wide.view(torch.int64).view(4, rows)
        self.starts, self.counts, self.prefixes, self.tails = few.view(4, sequences)
        self.bits = bits.view(rows, words)
        wide, few, bits = self._host.split(sizes)
        self._wide = wide.view(torch.int64).view(4, rows).numpy()
        self._few, self._bits = few.view(4, sequences).numpy(), bits.view(rows, words).numpy()
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    @property
    def rows(self) -> int:
        return len(self.tokens)

    def fill(self, cache: KVCache, blocks: Sequence[RowBlock]) -> None:
        """Describe the blocks' rows, end to end, behind the cache's rows of each sequence.

        The remaining rows are padding. They belong to the last block, see its first tail key
        only, and write to the slot behind its rows, which is never committed.
        Raises InputError for more rows than the tables hold.
        """
        if sum(block.rows for block in blocks) > self.rows:
            raise InputError(f"tables of {self.rows} rows cannot hold so many")
        if self._copied is not None:
            self._copied.synchronize()  # the last round's copy, finished long ago
        self._few[:], self._bits[:] = 0, 0
        self._bits[:, 0] = 1  # where a block does not say what its row sees, and of padding
        first = 0
        for block in blocks:
            stop, sequence, end = first + block.rows, block.sequence, cache.end(block.sequence)
            length = cache.lengths[sequence]
            self._wide[0, first:stop] = block.tokens
            self._wide[1, first:stop] = block.offsets + length
            self._wide[2, first:stop] = np.arange(end, end + block.rows)
            self._wide[3, first:stop] = sequence
            self._few[:, sequence] = first, block.rows, length, end + block.rows - length
            mask = block.mask()
            if mask is not None:
                self._bits[first:stop] = pack_bits(mask, self._bits.shape[1])
            first = stop
        self._wide[:, first:].T[:] = blocks[-1].tokens[-1], length, end + block.rows, sequence
        self._few[1, sequence] += self.rows - first
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
