"""One preallocated tensor for all keys and values, appended to and compacted in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from costmodel.errors import InputError
from decoder.device import to_device


class CacheShape(Protocol):
    """What decides the size of a token's keys and values; a `ModelArchitecture` does."""

    @property
    def layers(self) -> int: ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...


class KVCache:
    """Keys and values of every layer, for some sequences of texts of their own lengths.

    `data` is [layers, 2, sequences, kv_heads, slots, head_dim]: a slot for every token of the
    capacity, and one more that padding rows are written to when the others are taken. Of
    each sequence `lengths` tokens are committed. A forward writes its rows behind them, where
    they are pending until `commit` keeps some and forgets the rest, without touching the prefix.
    """

    def __init__(
        self,
        architecture: CacheShape,
        *,
        capacity: int,
        sequences: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (
            architecture.layers,
            2,
            sequences,
            architecture.kv_heads,
            capacity + 1,
            architecture.head_dim,
        )
        try:
            self.data = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:  # torch.OutOfMemoryError is a RuntimeError
            size_gb = torch.Size(shape).numel() * dtype.itemsize / 1e9
            raise InputError(
                f"no memory for a KV cache of {capacity} tokens x batch {sequences} "
                f"({size_gb:.1f} GB)",
                hint="Ask for fewer tokens, a smaller tree or a smaller batch.",
            ) from error
        self.lengths = [0] * sequences
        self.pending = [0] * sequences

    @property
    def capacity(self) -> int:
        return self.data.shape[4] - 1

    @property
    def sequences(self) -> int:
        return self.data.shape[2]

    def end(self, sequence: int) -> int:
        """The slot behind a sequence's committed and pending rows."""
        return self.lengths[sequence] + self.pending[sequence]

    def check_room(self, rows: int, sequence: int) -> None:
        """Raise InputError unless `rows` more rows fit behind the sequence's others."""
        if self.end(sequence) + rows > self.capacity:
            raise InputError(
                f"{rows} rows behind {self.end(sequence)} cached tokens do not fit a KV cache of "
                f"{self.capacity} tokens",
                hint="Use a smaller tree (--max-nodes), a shorter prompt or fewer new tokens.",
            )

    def write(
        self, layer: int, sequence: int, start: int, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Put a layer's new rows, [1, kv_heads, rows, head_dim] each, at slot `start` on."""
        end = start + key.shape[2]
        self.data[layer, 0, sequence, :, start:end] = key[0]
        self.data[layer, 1, sequence, :, start:end] = value[0]

    def read(self, layer: int, sequence: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of a layer's first keys and values, [1, kv_heads, tokens, head_dim] each."""
        sequences = slice(sequence, sequence + 1)
        return self.data[layer, 0, sequences, :, :tokens], self.data[
            layer, 1, sequences, :, :tokens
        ]

    def copy_from(self, other: KVCache, theirs: int, own: int) -> None:
        """Make the sequence `own` what the sequence `theirs` of a smaller cache is."""
        end = other.end(theirs)
        self.data[:, :, own, :, :end] = other.data[:, :, theirs, :, :end]
        self.lengths[own], self.pending[own] = other.lengths[theirs], other.pending[theirs]

    def commit(self, rows: Sequence[int], sequence: int = 0) -> None:
        """Keep these pending rows, in order, as the new end of the prefix; forget the others.

        Rows that already lie where they belong (0, 1, 2, ...) are not moved; the
        others are moved up by one gather over all layers.
        """
        length = self.lengths[sequence]
        start = next((i for i, row in enumerate(rows) if row != i), len(rows))
        if start < len(rows):
            source = to_device(length + np.array(rows[start:], dtype=np.int64), self.data.device)
            moved = self.data[:, :, sequence].index_select(3, source)
            self.data[:, :, sequence, :, length + start : length + len(rows)] = moved
        self.lengths[sequence] += len(rows)
        self.pending[sequence] = 0

    def truncate(self, length: int) -> None:
        """Forget everything behind the first `length` tokens of every sequence."""
        self.lengths = [length] * self.sequences
        self.pending = [0] * self.sequences
