"""The DFlash 2 drafter: a block's candidates, with probabilities behind each one before."""

from __future__ import annotations

import torch

from decoder.acceptance.drawn import LevelDistributions
from decoder.device import to_device
from decoder.drafters.base import DraftRequest, Draws
from decoder.drafters.dflash.drafter import BlockScores, DFlashDrafter
from decoder.model.runtime.capture import Tensors
from decoder.tree.growth import Frontier
from lab.drafters.conditional import (
    PairLattice,
    Slots,
    check_tables,
    compile_pairs,
    pair_lattice,
    score_pairs,
)
from lab.drafters.dflash2.model import DFlash2Model


class DFlash2Drafter(DFlashDrafter):
    """Drafts as DFlash does; the selector scores all pairs of adjacent candidates at once."""

    draws: Draws = "levels"
    model_type = DFlash2Model
    model: DFlash2Model

    def make_scores(self) -> BlockScores:
        return PairScores(self)


class PairScores(BlockScores):
    """The selector over the best candidates of each position."""

    def __init__(self, drafter: DFlash2Drafter) -> None:
        self._drafter, self._selector = drafter, drafter.model.candidate_selector
        check_tables(drafter.head, len(self._selector.successor_codebook))
        compile_pairs()

    def outputs(
        self, hidden: torch.Tensor, logits: torch.Tensor, bonus: torch.Tensor,
        temperature: torch.Tensor,
    ) -> Tensors:  # fmt: skip
        drafter = self._drafter
        slots = Slots.of(logits, drafter.model.config.top, temperature, drafter.head)
        first = self._selector(hidden[:1], bonus[None], slots.places[:1])
        edges = self._selector(hidden[1:], slots.tokens[:-1], slots.places[1:])
        return (score_pairs(slots, first[0, 0], edges),)

    def candidates(self, outputs: Tensors, request: DraftRequest) -> PairLattice:
        return pair_lattice(outputs[0], request.depth)

    def distributions(
        self, outputs: Tensors, bonus: torch.Tensor, temperature: float
    ) -> LevelDistributions:
        return pair_distributions(outputs[0], self._drafter.target.architecture.vocab)


def pair_distributions(packed: torch.Tensor, vocab: int) -> LevelDistributions:
    """The selector's q behind each node of a tree that is drawn: of its candidates alone.

    packed  as `score_pairs` gives it, at the temperature of the draws
    """
    tokens, chances = packed[..., 0].long(), packed[..., 1:].float()

    def q(frontier: Frontier) -> torch.Tensor:
        row, behind = frontier.depth, chances[0, :1]
        if row:
            drawn = to_device(frontier.tokens, tokens.device)
            behind = chances[row, (tokens[row - 1] == drawn[:, None]).long().argmax(-1)]
        share = (behind / behind.sum(-1, keepdim=True)).nan_to_num(0.0)
        return chances.new_zeros(len(behind), vocab).index_copy_(1, tokens[row], share)

    return q
