"""From a drafter's logits to the candidates that a tree is built from."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


def softmax(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """The drafter's distribution q, float32 [rows, vocab]; zero where logits are no numbers."""
    scaled = logits.float()
    if temperature != 1.0:
        scaled = scaled / temperature
    # A damaged drafter must propose nothing rather than spoil the arithmetic of a tree.
    return scaled.softmax(-1).nan_to_num_(0.0)


def most_probable(
    probabilities: torch.Tensor, width: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Ids and probabilities [rows, K] of the K = min(width, vocab) best, descending.

    One copy from the device: ids are exact as float64 beside their probabilities.
    """
    best = probabilities.topk(min(width, probabilities.shape[-1]))
    both = torch.stack((best.indices.double(), best.values.double())).cpu().numpy()
    return both[0].astype(np.int64), both[1]
