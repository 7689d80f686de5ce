"""The target's LM head, as objectives read it."""

from __future__ import annotations

import torch
from torch.nn import functional


class FrozenHead:
    """Logits of hidden states by given rows of the target's head, which stay as they are.

    Autocast would cast the rows anew at every product, since it keeps only weights that learn;
    on a CPU this took a tenth to a third of a step.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows.detach()
        self._narrow = {self._rows.dtype: self._rows}

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """[..., tokens] of states [..., hidden], in autocast's type or in that of the states."""
        kind = states.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype
        if dtype not in self._narrow:
            self._narrow[dtype] = self._rows.to(dtype)
        return functional.linear(states.to(dtype), self._narrow[dtype])

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows as they were given."""
        return self._rows.dtype
