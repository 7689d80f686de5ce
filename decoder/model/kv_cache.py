"""The KV cache: preallocated tensors, appended to and compacted in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from costmodel.errors import InputError
from decoder.device import to_device
from decoder.model.recurrence import StateCache, StateShape

# KV heads, widths of keys and values, the layer they are of; no width of values that are its keys
LayerStore = tuple[int, int, int, int]
Place = tuple[int, int]  # the number of a tensor of planes, and the plane in it


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """What a cache holds of a token.

    stores  of each layer, where they differ or share keys; the other sizes are the first layer's
    states  recurrent states and convolutions' columns, in the order of their layers
    """

    layers: int
    kv_heads: int
    head_dim: int
    stores: tuple[LayerStore, ...] = ()
    states: tuple[StateShape, ...] = ()

    @property
    def layer_stores(self) -> Sequence[LayerStore]:
        """`stores`, also where all layers are alike."""
        plain = self.kv_heads, self.head_dim, self.head_dim
        return self.stores or [(*plain, layer) for layer in range(self.layers)]


class KVCache:
    """Keys and values of every layer, for several sequences of different lengths.

    `planes` has a tensor [planes, sequences, kv_heads, slots, head_dim] for each size of keys or
    values, with one slot more than the capacity, for padding rows of a full sequence. Where all
    layers have one size, `data` is that tensor as [layers, 2, sequences, ...]. The first
    `lengths[s]` tokens of sequence s are committed. A forward writes its rows behind them. They
    are pending until `commit` keeps some of them and drops the rest; the prefix is not moved.
    """

    def __init__(
        self,
        shape: CacheShape,
        *,
        capacity: int,
        sequences: int,
        dtype: torch.dtype,
        device: torch.device,
        zeros: Callable[..., Tensor] = torch.zeros,
    ) -> None:
        """zeros: makes the tensors of keys and values"""
        self._places: list[tuple[Place, Place]] = []  # of each layer's keys and values
        counts: dict[tuple[int, int], int] = {}  # of planes of each size
        for layer, (heads, *widths, source) in enumerate(shape.layer_stores):
            pair = []
            for size in ((heads, width) for width in widths if width and source == layer):
                plane = counts[size] = counts.get(size, 0) + 1
                pair.append((list(counts).index(size), plane - 1))
            self._places.append((pair[0], pair[-1]) if pair else self._places[source])
        sizes = [(n, sequences, heads, capacity + 1, width) for (heads, width), n in counts.items()]
        try:
            self.planes = [zeros(size, dtype=dtype, device=device) for size in sizes]
            self.states = StateCache(shape.states, sequences, dtype, device)
        except RuntimeError as error:  # torch.OutOfMemoryError is a RuntimeError
            size_gb = sum(map(prod, sizes)) * dtype.itemsize / 1e9
            raise InputError(
                f"no memory for a KV cache of {capacity} tokens x batch {sequences} "
                f"({size_gb:.1f} GB)",
                hint="Ask for fewer tokens, a smaller tree or a smaller batch.",
            ) from error
        if shape.layers and not shape.stores:
            self.data = self.planes[0].view(shape.layers, 2, *sizes[0][1:])
        self.capacity, self.sequences = capacity, sequences
        self.dtype, self.device = dtype, device
        self.lengths = [0] * sequences
        self.pending = [0] * sequences

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

    def views(self, sequence: int, start: int, end: int) -> list[tuple[Tensor, Tensor]]:
        """Each layer's keys and values in slots start..end, [1, kv_heads, end - start, head_dim].

        Taken once a forward: an index into the cache costs as much as a small product.
        """
        parts = [plane[:, sequence, None, :, start:end].unbind(0) for plane in self.planes]
        return [(parts[i][j], parts[k][m]) for (i, j), (k, m) in self._places]

    def copy_from(self, other: KVCache, source: int, sequence: int) -> None:
        """Copy sequence `source` of a smaller cache to `sequence`."""
        self.states.copy_from(other.states, source, sequence)
        end = other.end(source)
        for ours, theirs in zip(self.planes, other.planes, strict=True):
            ours[:, sequence, :, :end] = theirs[:, source, :, :end]
        self.lengths[sequence] = other.lengths[source]
        self.pending[sequence] = other.pending[source]

    def commit(self, rows: Sequence[int], sequence: int = 0) -> None:
        """Append these pending rows to the prefix, in order, and drop the other pending rows.

        Leading rows 0, 1, 2, ... already lie in place. The others are moved by one gather over
        all layers.
        """
        if self.states.shapes:
            self.states.commit(rows, sequence)
        length = self.lengths[sequence]
        start = next((i for i, row in enumerate(rows) if row != i), len(rows))
        if start < len(rows):
            source = to_device(length + np.array(rows[start:], dtype=np.int64), self.device)
            for planes in self.planes:
                moved = planes[:, sequence].index_select(2, source)
                planes[:, sequence, :, length + start : length + len(rows)] = moved
        self.lengths[sequence] += len(rows)
        self.pending[sequence] = 0

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens of every sequence, without pending rows.

        Recurrent states become those of an empty text, or stay as they are: forwards can be
        timed behind them, but no text goes on.
        """
        self.lengths = [length] * self.sequences
        self.pending = [0] * self.sequences
        if length == 0:
            for sequence in range(self.sequences):
                self.states.clear(sequence)

    def cut(self, tokens: int, sequence: int) -> None:
        """Forget a sequence's pending rows, and the committed ones after the first `tokens`.

        Raises InputError for recurrent states, which cannot go back, but to an empty text.
        """
        if self.states.shapes and tokens < self.lengths[sequence]:
            if tokens:
                raise InputError("the states of this model cannot go back in a text")
            self.states.clear(sequence)
        self.lengths[sequence] = min(self.lengths[sequence], tokens)
        self.pending[sequence] = 0

    def fill_with_noise(self) -> None:
        """Keys, values and states of no text, to time forwards: zeros may run faster."""
        with torch.inference_mode():
            for planes in self.planes:
                planes.normal_()
            self.states.fill_with_noise()
