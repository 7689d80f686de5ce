"""The KV cache: one preallocated tensor, appended to and compacted in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from costmodel.errors import InputError
from decoder.device import to_device


class CacheShape(Protocol):
    """The sizes of a token's keys and values, as in a `ModelArchitecture`."""

    @property
    def layers(self) -> int: ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...


class KVCache:
    """Keys and values of every layer, for several sequences of different lengths.

    `data` is [layers, 2, sequences, kv_heads, slots, head_dim], with one slot more than the
    capacity, for padding rows of a full sequence. The first `lengths[s]` tokens of sequence s are
    committed. A forward writes its rows behind them. They are pending until `commit` keeps
    some of them and drops the rest; the prefix is not moved.
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

    def views(self, sequence: int, start: int, end: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each layer's keys and values in slots start..end, [1, kv_heads, end - start, head_dim].

        Taken once a forward: an index into the cache costs as much as a small product.
        """
        keys, values = self.data[:, :, sequence, None, :, start:end].unbind(1)
        return list(zip(keys, values, strict=True))

    def copy_from(self, other: KVCache, source: int, sequence: int) -> None:
        """Copy sequence `source` of a smaller cache to `sequence`."""
        end = other.end(source)
        self.data[:, :, sequence, :, :end] = other.data[:, :, source, :, :end]
        self.lengths[sequence], self.pending[sequence] = (
            other.lengths[source],
            other.pending[source],
        )

    def commit(self, rows: Sequence[int], sequence: int = 0) -> None:
        """Append these pending rows to the prefix, in order, and drop the other pending rows.

        Leading rows 0, 1, 2, ... already lie in place. The others are moved by one gather over
        all layers.
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
        """Keep the first `length` tokens of every sequence, without pending rows."""
        self.lengths = [length] * self.sequences
        self.pending = [0] * self.sequences
