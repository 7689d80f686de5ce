"""The kinds of runtimes, the outputs of their forwards, and the greedy tokens of logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

RuntimeKind = Literal["eager", "packed", "graphs"]
RuntimeChoice = Literal["auto", "eager", "packed", "graphs"]


NO_TOKEN = -1  # in place of a token where the logits are not numbers (NaN, infinite)


def greedy_tokens(logits: torch.Tensor) -> torch.Tensor:
    """The argmax of each row, int64 [...], of logits [..., vocab]; `NO_TOKEN` for no numbers.

    The largest value is NaN if any is, so it tells. No device is waited for.
    """
    if logits.is_cpu and logits.dtype == torch.float32:  # NumPy takes a tenth of torch's time
        tokens = torch.from_numpy(logits.numpy().argmax(-1, keepdims=True))
    else:
        tokens = logits.argmax(-1, keepdim=True)
    largest = logits.gather(-1, tokens)
    # NaN - NaN and inf - inf are not 0; the fewest launches that tell.
    return tokens.masked_fill_(largest - largest != 0, NO_TOKEN).squeeze(-1)


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
