"""The Domino drafter: a tree over the block's slots, corrected along each path."""

from __future__ import annotations

from pathlib import Path

import torch

from decoder.acceptance.drawn import LevelDistributions
from decoder.drafters.base import DraftRequest, Draws
from decoder.drafters.blocks import hash_of
from decoder.drafters.dflash.drafter import BlockScores, DFlashDrafter
from decoder.model.runtime.capture import Tensors
from decoder.model.target import Target
from decoder.tree.draft_tree import CandidateTree
from lab.drafters.conditional import (
    FRONTIER,
    LEVEL_NODES,
    Slots,
    check_tables,
    grow_levels,
    level_tree,
    path_distributions,
)
from lab.drafters.domino.model import Correction, DominoModel


class DominoDrafter(DFlashDrafter):
    """Drafts a block as DFlash does, and from it a tree, level by level but without a stop.

    candidates  tokens of a slot that are corrected; also the nodes of a level
    frontier    paths that are expanded in a level; 1 gives the greedy path and its siblings
    """

    draws: Draws = "levels"
    model_type = DominoModel
    model: DominoModel

    def __init__(
        self,
        target: Target,
        source: str | Path | DominoModel,
        block_size: int | None = None,
        *,
        candidates: int = LEVEL_NODES,
        frontier: int = FRONTIER,
    ) -> None:
        super().__init__(target, source, block_size)
        self.candidates, self.frontier = candidates, frontier
        tree = {"block": self.architecture_hash, "candidates": candidates, "frontier": frontier}
        self.architecture_hash = hash_of(tree)

    def make_scores(self) -> BlockScores:
        return LevelScores(self)


class LevelScores(BlockScores):
    """The levels of a tree over the block's slots."""

    def __init__(self, drafter: DominoDrafter) -> None:
        self._drafter = drafter
        check_tables(drafter.head, len(drafter.model.embed_proj[2].weight))
        self._correction = Correction(drafter.model, drafter.target)

    def outputs(
        self, hidden: torch.Tensor, logits: torch.Tensor, bonus: torch.Tensor,
        temperature: torch.Tensor,
    ) -> Tensors:  # fmt: skip
        drafter, correction = self._drafter, self._correction
        slots = Slots.of(logits, drafter.candidates, temperature, drafter.head)
        step = correction.step(hidden, slots)
        packed = grow_levels(slots, step, correction.start(), bonus, drafter.frontier)
        return packed, logits, hidden

    def candidates(self, outputs: Tensors, request: DraftRequest) -> CandidateTree:
        return level_tree(outputs[0], request.depth)

    def distributions(
        self, outputs: Tensors, bonus: torch.Tensor, temperature: float
    ) -> LevelDistributions:
        _, logits, hidden = outputs
        step, start = self._correction.step(hidden, None), self._correction.start()
        return path_distributions(self._drafter.head, logits, step, (start, bonus), temperature)
