"""The target's head as a drafter uses it: whole, or cut to the tokens that it was trained on.

A small drafter spends more on the rows of a large vocabulary than on its own layers. The tokens
are in a file of ours beside a checkpoint in the published format; engines that do not know it
draft with the whole head.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from costmodel.errors import InputError
from decoder.device import to_device
from decoder.drafters.checkpoint import TOKENS as FILE
from decoder.target import Target


class DraftHead:
    """Logits over some of the target's tokens, and what these tokens are.

    tokens  int64 [kept], ascending; None for the whole vocabulary
    Raises InputError for tokens that the target does not have.
    """

    def __init__(self, target: Target, tokens: NDArray[np.int64] | None) -> None:
        self._target = target
        self._vocab = target.architecture.vocab
        if tokens is not None and not 0 <= tokens.min() <= tokens.max() < self._vocab:
            raise InputError(
                f"{FILE} holds token {tokens.max()} and the target's vocabulary is {self._vocab}",
                hint="Use the drafter that was trained for this target.",
            )
        # A head that is more than one matrix is used whole.
        weight = None if tokens is None else target.head_rows(tokens)
        self._weight = weight
        self.tokens = None if weight is None else tokens

    @property
    def size(self) -> int:
        """Tokens that it knows."""
        return self._vocab if self.tokens is None else len(self.tokens)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, size] of hidden states [rows, hidden] behind the drafter's norm."""
        if self._weight is None:
            return self._target.head(hidden)
        return functional.linear(hidden, self._weight)

    def ids(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The target's tokens at places in the logits."""
        return places if self.tokens is None else self.tokens[places]

    def whole(self, probabilities: torch.Tensor) -> torch.Tensor:
        """[rows, vocab] of probabilities [rows, size]; zero for tokens that it does not know."""
        if self.tokens is None:
            return probabilities
        spread = probabilities.new_zeros(len(probabilities), self._vocab)
        places = to_device(self.tokens, probabilities.device)
        return spread.index_copy_(1, places, probabilities)


def read_tokens(folder: Path) -> NDArray[np.int64] | None:
    """The tokens of a checkpoint's head; None where it does not say.

    Raises InputError for a file that is not an ascending list of token ids.
    """
    place = folder / FILE
    if not place.is_file():
        return None
    try:
        found = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {place}", hint="Copy the checkpoint again.") from error
    whole = isinstance(found, list) and found and all(type(token) is int for token in found)
    if not whole or found[0] < 0 or any(a >= b for a, b in pairwise(found)):
        raise InputError(
            f"{place} is not a list of token ids, each larger than the one before",
            hint="Copy the checkpoint again, or remove the file to draft with the whole head.",
        )
    return np.array(found, dtype=np.int64)


def write_tokens(folder: Path, tokens: NDArray[np.int64]) -> None:
    """Write the tokens of a checkpoint's head, ascending."""
    (folder / FILE).write_text(json.dumps(tokens.tolist()) + "\n", encoding="utf-8")
