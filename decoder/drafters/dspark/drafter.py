"""The DSpark drafter: scores of all pairs of adjacent candidates, or a tree level by level."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch

from decoder.acceptance.drawn import LevelDistributions
from decoder.device import to_device
from decoder.drafters.base import DraftRequest
from decoder.drafters.conditional import (
    Slots,
    check_tables,
    grow_levels,
    level_tree,
    pair_lattice,
    score_pairs,
)
from decoder.drafters.dflash.drafter import BlockScores, DFlashDrafter
from decoder.drafters.dspark.config import FRONTIER, GROWN, PAIRED
from decoder.drafters.dspark.model import DSparkModel
from decoder.drafters.vocabulary import softmax
from decoder.model.runtime.capture import Tensors
from decoder.model.target import Target
from decoder.tree.draft_tree import CandidateTree
from decoder.tree.growth import Frontier
from decoder.tree.pairs import PairLattice


class DSparkDrafter(DFlashDrafter):
    """Drafts with DFlash's backbone and a correction by the tokens before.

    Its sampled trees are drawn level by level, from q behind each node.
    """

    model: DSparkModel
    model_type: ClassVar[type[DSparkModel]] = DSparkModel

    def __init__(
        self, target: Target, source: str | Path | DSparkModel, block_size: int | None = None
    ) -> None:
        super().__init__(target, source, block_size)
        if self.model.config.rank:
            self.draws = "levels"

    def make_scores(self) -> BlockScores:
        config = self.model.config
        if config.correction == "none":
            return super().make_scores()
        check_tables(self.head, self.model.markov_head.markov_w2.out_features)
        return MarkovLevels(self) if config.correction == "rnn" else MarkovPairs(self)


class MarkovPairs(BlockScores):
    """Scores by the token before alone: all edges of all positions in one product."""

    def __init__(self, drafter: DSparkDrafter) -> None:
        self._drafter, self._markov = drafter, drafter.model.markov_head

    def outputs(
        self, hidden: torch.Tensor, bonus: torch.Tensor, temperature: torch.Tensor
    ) -> Tensors:
        logits, markov = self._drafter.logits(hidden), self._markov
        slots = Slots.of(logits, PAIRED, temperature, self._drafter.head)
        after = markov.markov_w2.weight[slots.places].float()  # [rows, K, r]
        first = markov.vectors(hidden[:1], bonus[None]).float() @ after[:1].mT
        edges = markov.vectors(hidden[1:], slots.tokens[:-1]).float() @ after[1:].mT
        return score_pairs(slots, first[0, 0], edges), logits, hidden

    def candidates(self, outputs: Tensors, request: DraftRequest) -> PairLattice:
        return pair_lattice(outputs[0], request.depth)

    def distributions(
        self, outputs: Tensors, bonus: torch.Tensor, temperature: float
    ) -> LevelDistributions:
        return MarkovDistributions(self._drafter, outputs, bonus, temperature)


class MarkovLevels(MarkovPairs):
    """Scores by a state that goes along the path: a tree that grows level by level."""

    def __init__(self, drafter: DSparkDrafter) -> None:
        super().__init__(drafter)
        self._weight = self._markov.path_weight()

    def outputs(
        self, hidden: torch.Tensor, bonus: torch.Tensor, temperature: torch.Tensor
    ) -> Tensors:
        logits, markov = self._drafter.logits(hidden), self._markov
        slots = Slots.of(logits, GROWN, temperature, self._drafter.head)
        parts, after = markov.parts(hidden), markov.markov_w2.weight[slots.places].float()

        def step(
            row: int, states: torch.Tensor, tokens: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            states, vectors = markov.step(parts[row], self._weight, states, tokens)
            return states, vectors @ after[row].mT

        state = after.new_zeros(1, after.shape[-1])
        return grow_levels(slots, step, state, bonus, FRONTIER), logits, hidden

    def candidates(self, outputs: Tensors, request: DraftRequest) -> CandidateTree:
        return level_tree(outputs[0], request.depth)


class MarkovDistributions(LevelDistributions):
    """The drafter's q over the whole vocabulary behind each node of a tree that is drawn."""

    def __init__(
        self, drafter: DSparkDrafter, outputs: Tensors, bonus: torch.Tensor, temperature: float
    ) -> None:
        _, self._logits, self._hidden = outputs
        self._drafter, self._bonus, self._temperature = drafter, bonus, temperature
        self._states = torch.zeros(1, drafter.model.config.rank, device=self._hidden.device)

    def root(self) -> torch.Tensor:
        self._states = torch.zeros_like(self._states[:1])
        return self._behind(0, self._states, self._bonus)

    def expand(self, frontier: Frontier) -> torch.Tensor:
        device = self._hidden.device
        above, tokens = (to_device(part, device) for part in (frontier.above, frontier.tokens))
        return self._behind(frontier.depth, self._states[above], tokens)

    def _behind(self, row: int, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """q [F, vocab] of a row behind tokens [F], and the states there for the next level."""
        drafter, markov = self._drafter, self._drafter.model.markov_head
        hidden = self._hidden[row : row + 1]
        if drafter.model.config.correction == "rnn":
            part, weight = markov.parts(hidden), markov.path_weight()
            self._states, vectors = markov.step(part, weight, states, tokens)
        else:
            self._states, vectors = states, markov.vectors(hidden, tokens[None])[0]
        added = markov.markov_w2(vectors.to(hidden.dtype))
        logits = self._logits[row].float() + added.float()
        return drafter.head.whole(softmax(logits, self._temperature))
