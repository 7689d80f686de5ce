"""The Domino drafter: a tree over the block's slots, corrected along each path."""

from __future__ import annotations

from pathlib import Path

import torch

from decoder.acceptance.drawn import LevelDistributions
from decoder.device import to_device
from decoder.drafters.base import DraftRequest, Draws
from decoder.drafters.blocks import hash_of
from decoder.drafters.conditional import Slots, check_tables, grow_levels, level_tree
from decoder.drafters.dflash.drafter import BlockScores, DFlashDrafter
from decoder.drafters.domino.model import Correction, DominoModel
from decoder.drafters.vocabulary import softmax
from decoder.model.runtime.capture import Tensors
from decoder.model.target import Target
from decoder.tree.draft_tree import CandidateTree
from decoder.tree.growth import Frontier

# DARTree's settings: tokens of a slot whose scores are corrected, and paths expanded in a level.
CANDIDATES, FRONTIER = 64, 12


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
        candidates: int = CANDIDATES,
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
        self, hidden: torch.Tensor, bonus: torch.Tensor, temperature: torch.Tensor
    ) -> Tensors:
        drafter, correction = self._drafter, self._correction
        logits = drafter.logits(hidden)
        slots = Slots.of(logits, drafter.candidates, temperature, drafter.head)
        step = correction.step(hidden, slots)
        packed = grow_levels(slots, step, correction.start(), bonus, drafter.frontier)
        return packed, logits, hidden

    def candidates(self, outputs: Tensors, request: DraftRequest) -> CandidateTree:
        return level_tree(outputs[0], request.depth)

    def distributions(
        self, outputs: Tensors, bonus: torch.Tensor, temperature: float
    ) -> LevelDistributions:
        return PathDistributions(self._drafter, self._correction, outputs, bonus, temperature)


class PathDistributions(LevelDistributions):
    """The drafter's q over its whole head behind each node of a tree that is drawn."""

    def __init__(
        self,
        drafter: DominoDrafter,
        correction: Correction,
        outputs: Tensors,
        bonus: torch.Tensor,
        temperature: float,
    ) -> None:
        _, self._logits, hidden = outputs
        self._head, self._bonus, self._temperature = drafter.head, bonus, temperature
        self._step = correction.step(hidden, None)
        self._start = self._states = correction.start()

    def root(self) -> torch.Tensor:
        return self._behind(0, self._start, self._bonus)

    def expand(self, frontier: Frontier) -> torch.Tensor:
        device = self._bonus.device
        above, tokens = (to_device(part, device) for part in (frontier.above, frontier.tokens))
        return self._behind(frontier.depth, self._states[above], tokens)

    def _behind(self, row: int, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """q [F, vocab] of a slot behind tokens [F], and the states there for the next level."""
        self._states, added = self._step(row, states, tokens)
        return self._head.whole(softmax(self._logits[row].float() + added, self._temperature))
