"""Recurrent states of a model's layers, with the life of the keys and values beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from costmodel.errors import InputError
from decoder.model.recurrence import KeptRows, stepped

# `conv` with channels and columns, `delta` or `ssm` with heads, keys and values.
StateShape = tuple[str | int, ...]
Kept = Any  # columns, a rule's `KeptRows`, or None


class PendingStates:
    """What is kept of a sequence's pending rows for each state, until some are committed.

    rows    number of them
    kept    columns [channels, rows] of a convolution, or what its rule keeps; None of a longer
            piece of text, which is committed whole
    behind  the state behind all rows; None where they are no piece of text
    """

    def __init__(self, states: int) -> None:
        self.rows = 0
        self.kept: list[Kept] = [None] * states
        self.behind: list[torch.Tensor | None] = [None] * states

    def add(self, number: int, kept: Kept, behind: torch.Tensor | None = None) -> None:
        """Keep further rows of a state."""
        before = self.kept[number]
        if isinstance(before, torch.Tensor):
            assert isinstance(kept, torch.Tensor)
            kept = torch.cat((before, kept), 1)
        elif before is not None:
            assert isinstance(kept, KeptRows)
            kept = KeptRows(*(torch.cat(pair, 1) for pair in zip(before, kept, strict=True)))
        self.kept[number], self.behind[number] = kept, behind


class StateCache:
    """The states of every layer that has one, by sequence.

    A state is never written to: another takes its place. So a copy of a sequence costs nothing.
    Rules keep theirs in float32 whatever the model's dtype is.

    shapes  of each state, in the order in which a forward asks for them
    """

    def __init__(
        self, shapes: Sequence[StateShape], sequences: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shapes = tuple(shapes)
        self._zeros = [
            torch.zeros(
                [int(size) for size in sizes],
                dtype=dtype if kind == "conv" else torch.float32,
                device=device,
            )
            for kind, *sizes in shapes
        ]
        self._states = [list(self._zeros) for _ in range(sequences)]
        self._pending = [PendingStates(len(shapes)) for _ in range(sequences)]

    def state(self, number: int, sequence: int) -> torch.Tensor:
        """A state behind the sequence's committed tokens: [channels, columns] or [heads, ...]."""
        return self._states[sequence][number]

    def pending(self, sequence: int) -> PendingStates:
        return self._pending[sequence]

    def pending_rows(self) -> list[PendingStates]:
        """The pending rows of all sequences; `keep` makes them pending again, to time a commit."""
        return list(self._pending)

    def keep(self, pending: Sequence[PendingStates]) -> None:
        self._pending = list(pending)

    def drop(self, sequence: int) -> None:
        """Forget the pending rows."""
        self._pending[sequence] = PendingStates(len(self.shapes))

    def clear(self, sequence: int) -> None:
        """Begin an empty text."""
        self._states[sequence] = list(self._zeros)
        self.drop(sequence)

    def copy_from(self, other: StateCache, source: int, sequence: int) -> None:
        self._states[sequence] = list(other._states[source])
        pending, copied = other._pending[source], PendingStates(len(self.shapes))
        copied.rows = pending.rows
        copied.kept, copied.behind = list(pending.kept), list(pending.behind)
        self._pending[sequence] = copied

    def commit(self, rows: Sequence[int], sequence: int) -> None:
        """Step along these pending rows, which are a path from the first.

        They are forgotten at the next forward.
        """
        pending = self._pending[sequence]
        if not pending.rows:
            return
        whole = list(rows) == list(range(pending.rows))
        self._states[sequence] = [
            behind if whole and behind is not None else _committed(str(kind), state, kept, rows)
            for (kind, *_), state, kept, behind in zip(
                self.shapes, self._states[sequence], pending.kept, pending.behind, strict=True
            )
        ]

    def fill_with_noise(self) -> None:
        """States of a text that was not read, to time forwards."""
        self._states = [[torch.randn_like(zero) for zero in self._zeros] for _ in self._states]


def _committed(kind: str, state: torch.Tensor, kept: Kept, rows: Sequence[int]) -> torch.Tensor:
    if not rows:
        return state
    if kept is None:
        raise InputError("the rows of a piece of text can only be committed together")
    if isinstance(kept, torch.Tensor):
        path = kept[:, torch.tensor(list(rows), device=kept.device)]
        columns = torch.cat((state, path), 1)
        return columns[:, columns.shape[1] - state.shape[1] :].contiguous()
    for row in rows:
        state, _ = stepped(kind, state, kept, row)
    return state
