"""The DSpark drafter: scores of all pairs of adjacent candidates, or a tree level by level."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import torch

from decoder.acceptance.drawn import LevelDistributions
from decoder.drafters.base import DraftRequest
from decoder.drafters.dflash.drafter import BlockScores, DFlashDrafter
from decoder.model.runtime.capture import Tensors
from decoder.model.target import Target
from decoder.tree.draft_tree import CandidateTree
from lab.drafters.conditional import (
    FRONTIER,
    LEVEL_NODES,
    PairLattice,
    Slots,
    Step,
    check_tables,
    compile_pairs,
    grow_levels,
    level_tree,
    pair_lattice,
    path_distributions,
    score_pairs,
)
from lab.drafters.dspark.model import PAIRED, DSparkModel


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
        if config.correction == "rnn":
            return MarkovLevels(self)
        compile_pairs()
        return MarkovPairs(self)


class MarkovPairs(BlockScores):
    """Scores by the token before alone: all edges of all positions in one product."""

    def __init__(self, drafter: DSparkDrafter) -> None:
        self._drafter, self._markov = drafter, drafter.model.markov_head

    def outputs(
        self, hidden: torch.Tensor, logits: torch.Tensor, bonus: torch.Tensor,
        temperature: torch.Tensor,
    ) -> Tensors:  # fmt: skip
        markov = self._markov
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
        _, logits, hidden = outputs
        start = torch.zeros(1, self._drafter.model.config.rank, device=hidden.device), bonus
        head, step = self._drafter.head, self._whole_step(hidden)
        return path_distributions(head, logits, step, start, temperature)

    def _whole_step(self, hidden: torch.Tensor) -> Step:
        """The step that adds to all logits of a row."""
        markov = self._markov

        def step(
            row: int, states: torch.Tensor, tokens: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            vectors = markov.vectors(hidden[row : row + 1], tokens[None])[0]
            return states, markov.markov_w2(vectors).float()

        return step


class MarkovLevels(MarkovPairs):
    """Scores by a state that goes along the path: a tree that grows level by level."""

    def __init__(self, drafter: DSparkDrafter) -> None:
        super().__init__(drafter)
        self._weight = self._markov.path_weight()

    def outputs(
        self, hidden: torch.Tensor, logits: torch.Tensor, bonus: torch.Tensor,
        temperature: torch.Tensor,
    ) -> Tensors:  # fmt: skip
        slots = Slots.of(logits, LEVEL_NODES, temperature, self._drafter.head)
        after = self._markov.markov_w2.weight[slots.places].float()
        step = self._step(hidden, lambda row, vectors: vectors @ after[row].mT)
        state = after.new_zeros(1, after.shape[-1])
        return grow_levels(slots, step, state, bonus, FRONTIER), logits, hidden

    def candidates(self, outputs: Tensors, request: DraftRequest) -> CandidateTree:
        return level_tree(outputs[0], request.depth)

    def _whole_step(self, hidden: torch.Tensor) -> Step:
        w2 = self._markov.markov_w2
        return self._step(hidden, lambda _, vectors: w2(vectors.to(hidden.dtype)).float())

    def _step(
        self, hidden: torch.Tensor, scores: Callable[[int, torch.Tensor], torch.Tensor]
    ) -> Step:
        """The step along paths; `scores` of a row and of what W2 multiplies [F, r]."""
        parts = self._markov.parts(hidden)

        def step(
            row: int, states: torch.Tensor, tokens: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            states, vectors = self._markov.step(parts[row], self._weight, states, tokens)
            return states, scores(row, vectors)

        return step
