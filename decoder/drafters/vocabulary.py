"""Vocabularies of drafters: reduced heads, candidates from logits, agreement with the target's.

A small drafter spends more time on a large vocabulary than on its own layers, so its head may be
cut to the tokens it was trained on. These are in a file of this project's own beside a checkpoint
in the published format; engines that do not know it draft with the whole head.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import nn

from costmodel.errors import InputError
from costmodel.io import read_json, write_atomic
from costmodel.statistics import Array, Ints
from decoder.acceptance.drawn import LevelDistributions
from decoder.acceptance.sampling import cooled
from decoder.device import to_device
from decoder.drafters.checkpoint import TOKENS as FILE
from decoder.model.loading import LoadedModel
from decoder.model.runtime.linear import TiledLinear, join
from decoder.model.target import Target
from decoder.tree.growth import Children, Frontier, LevelSource


class DraftHead:
    """The target's LM head, whole or cut to some tokens.

    tokens  int64 [size], ascending; None for the whole vocabulary
    weight  [size, hidden] of a drafter's own head, in the place of the target's rows
    Raises InputError for tokens that the target does not have.
    """

    def __init__(
        self, target: Target, tokens: Ints | None, weight: torch.Tensor | None = None
    ) -> None:
        self._target = target
        self._vocab = target.architecture.vocab
        if tokens is not None and not 0 <= tokens.min() <= tokens.max() < self._vocab:
            raise InputError(
                f"{FILE} holds token {tokens.max()} and the target's vocabulary is {self._vocab}",
                hint="Use the drafter that was trained for this target.",
            )
        # A head that is more than one matrix is used whole.
        if weight is None and tokens is not None:
            weight = target.head_rows(tokens)
        self._product = None if weight is None else join([linear_of(weight)])
        self.tokens = None if weight is None else tokens
        self.device_ids = None if self.tokens is None else to_device(self.tokens, target.device)

    @property
    def tiled(self) -> TiledLinear | None:
        return self._product if isinstance(self._product, TiledLinear) else None

    @property
    def size(self) -> int:
        return self._vocab if self.tokens is None else len(self.tokens)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [rows, size] of hidden states [rows, hidden] after the drafter's norm."""
        return self._target.head(hidden) if self._product is None else self._product(hidden)

    def ids(self, places: Ints) -> Ints:
        return places if self.tokens is None else self.tokens[places]

    def whole(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Probabilities [rows, vocab] of [rows, size]; zero for tokens without a row."""
        return over_vocabulary(probabilities, self.tokens, self._vocab)


def linear_of(weight: torch.Tensor) -> nn.Linear:
    """A layer over a weight [out, in], without a copy."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def read_tokens(folder: Path) -> Ints | None:
    """The tokens of a checkpoint's reduced head, or None. Raises InputError for other lists."""
    place = folder / FILE
    if not place.is_file():
        return None
    tokens = read_json(place, hint="Copy the checkpoint again.")
    whole = isinstance(tokens, list) and tokens and all(type(token) is int for token in tokens)
    if not whole or tokens[0] < 0 or any(a >= b for a, b in pairwise(tokens)):
        raise InputError(
            f"{place} is not a list of token ids, each larger than the one before",
            hint="Copy the checkpoint again, or remove the file to draft with the whole head.",
        )
    return np.array(tokens, dtype=np.int64)


def write_tokens(folder: Path, tokens: Ints) -> None:
    """Write the tokens of a checkpoint's head, ascending."""
    write_atomic(folder / FILE, json.dumps(tokens.tolist()) + "\n", InputError)


def check_vocabulary(drafter: LoadedModel, target: LoadedModel) -> None:
    """Raise InputError unless both models give the same tokens the same ids.

    If both have a tokenizer, the tokenizers' vocabularies are compared, since models of one
    family pad their embeddings to different sizes; otherwise the sizes must agree.
    """
    ours, theirs = _token_ids(drafter), _token_ids(target)
    if ours is None or theirs is None:
        if drafter.architecture.vocab != target.architecture.vocab:
            raise InputError(
                f"the drafter {drafter.name} has a vocabulary of {drafter.architecture.vocab} "
                f"tokens and the target {target.name} one of {target.architecture.vocab}",
                hint="Use a smaller model of the target's own family.",
            )
        return
    if different := ours.items() ^ theirs.items():
        token = min(token for token, _ in different)
        said = [f"id {ids[token]}" if token in ids else "no token" for ids in (ours, theirs)]
        raise InputError(
            f"tokenizer mismatch between the drafter {drafter.name} and the target "
            f"{target.name}: {len(different)} entries differ, such as {token!r}, which is "
            f"{said[0]} for the drafter and {said[1]} for the target",
            hint="Use a smaller model of the target's own family.",
        )


def _token_ids(loaded: LoadedModel) -> dict[str, int] | None:
    """The tokenizer's vocabulary; None for a model without a tokenizer."""
    try:
        return dict(loaded.tokenizer().get_vocab())
    except InputError:
        return None


def softmax(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """The drafter's distribution q, float32 [rows, vocab]; 0 where logits are not a number."""
    scaled = logits.float()
    if temperature != 1.0:
        scaled = cooled(scaled, temperature)
    # A damaged drafter must propose nothing rather than spoil the arithmetic of a tree.
    return scaled.softmax(-1).nan_to_num_(0.0)


def most_probable(probabilities: torch.Tensor, width: int) -> tuple[Ints, Array]:
    """Ids and probabilities [rows, K] of the min(width, vocab) best, descending; one copy."""
    best = probabilities.topk(min(width, probabilities.shape[-1]))
    both = torch.stack((best.indices.double(), best.values.double())).cpu().numpy()
    return both[0].astype(np.int64), both[1]


def over_vocabulary(probabilities: torch.Tensor, tokens: Ints | None, vocab: int) -> torch.Tensor:
    """Probabilities [rows, vocab] from those of some tokens int64 [tokens]; None: of all."""
    if tokens is None:
        return probabilities
    whole = probabilities.new_zeros(len(probabilities), vocab)
    return whole.index_copy_(1, to_device(tokens, probabilities.device), probabilities)


def top_children(q: LevelDistributions, tokens: Ints | None = None) -> LevelSource:
    """The most probable children of each node; `tokens` are the target's, by columns of q."""

    def children(frontier: Frontier, width: int) -> Children:
        ids, probabilities = most_probable(q(frontier), width)
        return ids if tokens is None else tokens[ids], probabilities

    return children
