"""What a runtime is to the target: something that runs rows behind what its cache holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from decoder.ancestors import ancestor_bits, pack_bits, visibility
from decoder.kv_cache import KVCache
from decoder.runtime.capture import BudgetedCapture

RuntimeKind = Literal["eager", "graphs"]
RuntimeChoice = Literal["auto", "eager", "graphs"]


class Visible(Protocol):
    """Which pending and new rows each new row sees."""

    def dense(self) -> NDArray[np.bool_]:
        """[rows, pending + rows]."""

    def bits(self, words: int) -> NDArray[np.int32]:
        """[rows, words]: key j is bit j % 32 of word j // 32."""


@dataclass(frozen=True, slots=True)
class TreeVisible:
    """Rows of a tree behind a root, each seeing itself and its ancestors.

    parents  int64 [rows - 1]  row of each node's parent
    """

    parents: NDArray[np.int64]

    def dense(self) -> NDArray[np.bool_]:
        return visibility(self.parents)

    def bits(self, words: int) -> NDArray[np.int32]:
        return ancestor_bits(self.parents, words)


@dataclass(frozen=True, slots=True)
class DenseVisible:
    """A visibility that is written out, [rows, pending + rows]."""

    array: NDArray[np.bool_]

    def dense(self) -> NDArray[np.bool_]:
        return self.array

    def bits(self, words: int) -> NDArray[np.int32]:
        return pack_bits(self.array, words)


@dataclass(frozen=True, slots=True)
class RowBlock:
    """One sequence's rows of a forward, on the host.

    tokens   int64 [rows]
    offsets  int64 [rows]  positions behind the committed tokens
    visible  None for a single row without pending ones before it
    """

    sequence: int
    tokens: NDArray[np.int64]
    offsets: NDArray[np.int64]
    visible: Visible | None

    @property
    def rows(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What a forward gave, for the rows of all blocks end to end.

    logits    [rows, vocab], or [1, vocab] of the last row where only that was asked for
    features  [rows, width], None where no layer is captured

    A graph runtime returns views of its static buffers: the next forward overwrites them.
    """

    logits: torch.Tensor
    features: torch.Tensor | None


class Runtime(Protocol):
    """Runs forwards of one model; the target counts the rows as pending afterwards."""

    kind: RuntimeKind

    @property
    def capture(self) -> BudgetedCapture | None:
        """What records device work, for a drafter's forwards too; None where nothing does."""

    @property
    def buckets(self) -> tuple[int, ...]:
        """Row counts that forwards are padded to; none where they are not."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What went otherwise than asked for, in words."""

    def forward(self, cache: KVCache, blocks: Sequence[RowBlock]) -> Forwarded:
        """One forward over the blocks, each behind the committed and pending rows it has."""

    def forget(self) -> None:
        """Drop what was captured, because the model or its captured layers have changed."""
