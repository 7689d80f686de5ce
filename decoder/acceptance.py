"""Which drafted tokens the target accepts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from decoder.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Accepted:
    """The outcome of one verification.

    rows    accepted rows of the forward, in path order, without the root
    tokens  their tokens
    bonus   the target's own token after the last accepted row; root of the next tree
    """

    rows: list[int]
    tokens: list[int]
    bonus: int


def walk(tree: DraftTree, logits: torch.Tensor, pick: Callable[[torch.Tensor], int]) -> Accepted:
    """Follow the target's own draws down a deterministic tree.

    At each visited row the target draws its token (argmax at T = 0). If a child
    carries it, descend; otherwise it is the bonus token. Exact at any temperature,
    because every emitted token is the target's own draw and the tree does not
    depend on it; only visited rows are processed.

    logits  [rows, vocab] of the verification forward
    """
    rows: list[int] = []
    tokens: list[int] = []
    row = 0
    while True:
        token = pick(logits[row])
        child = tree.child(row, token)
        if child < 0:
            return Accepted(rows, tokens, token)
        rows.append(child)
        tokens.append(token)
        row = child
