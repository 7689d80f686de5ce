"""The kinds of runtimes, and the outputs of their forwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

RuntimeKind = Literal["eager", "packed", "graphs"]
RuntimeChoice = Literal["auto", "eager", "packed", "graphs"]


NO_TOKEN = -1  # in place of a token where the logits are not numbers (NaN, infinite)


class ChosenTokens:
    """The greedy tokens of a captured forward; their copy to the host begins right behind it."""

    def __init__(self, rows: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._device = torch.full((rows,), NO_TOKEN, dtype=torch.int64, device=device)
        self._host = torch.full((rows,), NO_TOKEN, dtype=torch.int64, pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None

    def put(self, tokens: torch.Tensor) -> None:
        """Keep tokens int64 [rows], as part of the captured forward."""
        self._device.copy_(tokens)

    def send(self) -> None:
        """Begin the copy to the host, behind a replay."""
        self._host.copy_(self._device, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def read(self, rows: int) -> NDArray[np.int64]:
        """The tokens of the first rows, int64 [rows]; waits until the copy is there."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host[:rows].numpy().copy()


@dataclass(frozen=True, slots=True)
class ForwardOutputs:
    """The outputs of a forward, with the rows of all blocks end to end.

    logits    [rows, vocab], or [1, vocab] where only the last row's were requested
    features  [rows, width], None where no layer is captured
    chosen    the rows' greedy tokens on their way to the host, where the forward chose them

    A graph runtime returns views of its static buffers, which the next forward overwrites.
    """

    logits: torch.Tensor
    features: torch.Tensor | None
    chosen: ChosenTokens | None = None
