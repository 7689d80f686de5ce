"""One preallocated tensor for all keys and values, appended to and compacted in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from costmodel.architecture import ModelArchitecture
from costmodel.errors import InputError


class KVCache:
    """Keys and values of every layer in one tensor.

    `data` is [layers, 2, batch, kv_heads, capacity, head_dim]; `length` tokens are
    committed. A forward writes its rows behind them; `commit` keeps the accepted
    ones and forgets the rest, without touching the prefix.
    """

    def __init__(
        self,
        architecture: ModelArchitecture,
        *,
        capacity: int,
        batch: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (
            architecture.layers,
            2,
            batch,
            architecture.kv_heads,
            capacity,
            architecture.head_dim,
        )
        try:
            self.data = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:  # torch.OutOfMemoryError is a RuntimeError
            size_gb = torch.Size(shape).numel() * dtype.itemsize / 1e9
            raise InputError(
                f"no memory for a KV cache of {capacity} tokens x batch {batch} ({size_gb:.1f} GB)",
                hint="Ask for fewer tokens, a smaller tree or a smaller batch.",
            ) from error
        self.length = 0

    @property
    def capacity(self) -> int:
        return self.data.shape[4]

    @property
    def batch(self) -> int:
        return self.data.shape[2]

    def check_room(self, rows: int) -> None:
        """Raise InputError unless `rows` more rows fit behind the committed ones."""
        if self.length + rows > self.capacity:
            raise InputError(
                f"{rows} rows behind {self.length} cached tokens do not fit a KV cache of "
                f"{self.capacity} tokens",
                hint="Use a smaller tree (--max-nodes), a shorter prompt or fewer new tokens.",
            )

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put a layer's new rows, [batch, kv_heads, rows, head_dim] each, behind the prefix."""
        end = self.length + key.shape[2]
        self.data[layer, 0, :, :, self.length : end] = key
        self.data[layer, 1, :, :, self.length : end] = value

    def read(self, layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of a layer's first keys and values, [batch, kv_heads, tokens, head_dim] each."""
        return self.data[layer, 0, :, :, :tokens], self.data[layer, 1, :, :, :tokens]

    def commit(self, rows: Sequence[int]) -> None:
        """Keep the given rows of the last forward, in order, as the new end of the prefix.

        Rows that already lie where they belong (0, 1, 2, ...) are not moved; the
        others are moved up by one gather over all layers.
        """
        start = next((i for i, row in enumerate(rows) if row != i), len(rows))
        if start < len(rows):
            source = torch.tensor(
                [self.length + row for row in rows[start:]], device=self.data.device
            )
            moved = self.data.index_select(4, source)
            self.data[:, :, :, :, self.length + start : self.length + len(rows)] = moved
        self.length += len(rows)

    def truncate(self, length: int) -> None:
        """Forget everything behind the first `length` tokens."""
        self.length = length
