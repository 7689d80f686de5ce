"""The DFlash 2 drafter: a block's candidates, with probabilities behind each one before."""

from __future__ import annotations

import torch

from decoder.drafters.base import DraftRequest, Draws
from decoder.drafters.conditional import Slots, check_tables, pair_lattice, score_pairs
from decoder.drafters.dflash.drafter import BlockScores, DFlashDrafter
from decoder.drafters.dflash2.model import DFlash2Model
from decoder.model.runtime.capture import Tensors
from decoder.tree.pairs import PairLattice


class DFlash2Drafter(DFlashDrafter):
    """Drafts as DFlash does; the selector scores all pairs of adjacent candidates at once.

    A sampled tree would need the selector's q over the whole vocabulary, which it does not have.
    """

    draws: Draws = "never"
    model_type = DFlash2Model
    model: DFlash2Model

    def make_scores(self) -> BlockScores:
        return PairScores(self)


class PairScores(BlockScores):
    """The selector over the best candidates of each position."""

    def __init__(self, drafter: DFlash2Drafter) -> None:
        self._drafter, self._selector = drafter, drafter.model.candidate_selector
        check_tables(drafter.head, len(self._selector.successor_codebook))

    def outputs(
        self, hidden: torch.Tensor, bonus: torch.Tensor, temperature: torch.Tensor
    ) -> Tensors:
        drafter = self._drafter
        slots = Slots.of(
            drafter.logits(hidden), drafter.model.config.top, temperature, drafter.head
        )
        first = self._selector(hidden[:1], bonus[None], slots.places[:1])
        edges = self._selector(hidden[1:], slots.tokens[:-1], slots.places[1:])
        return (score_pairs(slots, first[0, 0], edges),)

    def candidates(self, outputs: Tensors, request: DraftRequest) -> PairLattice:
        return pair_lattice(outputs[0], request.depth)
