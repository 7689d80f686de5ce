"""The DSpark drafter: scores of all pairs of adjacent candidates, or a tree level by level."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch
from torch.nn import functional

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
from decoder.drafters.vocabulary import DraftHead
from decoder.model.runtime.capture import Tensors
from decoder.model.target import Target
from decoder.tree.draft_tree import CandidateTree
from decoder.tree.pairs import PairLattice


class DSparkDrafter(DFlashDrafter):
    """Drafts with DFlash's backbone and a correction by the tokens before.

    No whole q is given, so that its trees are verified by the tokens that the target draws.
    """

    model: DSparkModel
    model_type: ClassVar[type[DSparkModel]] = DSparkModel

    def __init__(
        self, target: Target, source: str | Path | DSparkModel, block_size: int | None = None
    ) -> None:
        super().__init__(target, source, block_size)
        if self.model.config.rank:
            self.draws = "never"

    def make_head(self) -> DraftHead:
        self.model.settle(self.target)
        return DraftHead(self.target, self.model.head_tokens, self.model.own_head)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        own = self.model.own_embedding
        return super().embed(tokens) if own is None else functional.embedding(tokens, own)

    def make_scores(self) -> BlockScores:
        config = self.model.config
        if config.correction == "none":
            return super().make_scores()
        check_tables(self.head, self.model.markov_head.markov_w2.out_features)
        return MarkovLevels(self) if config.correction == "rnn" else MarkovPairs(self)


class MarkovPairs(BlockScores):
    """Scores by the token before alone: all edges of all positions in one product."""

    def __init__(self, drafter: DSparkDrafter) -> None:
        self._head, self._drafter = drafter.model.markov_head, drafter
        self._gated = drafter.model.config.correction == "gated"

    def outputs(
        self, hidden: torch.Tensor, bonus: torch.Tensor, temperature: torch.Tensor
    ) -> Tensors:
        head = self._drafter.head
        slots = Slots.of(self._drafter.logits(hidden), PAIRED, temperature, head)
        before = self._head.markov_w1(slots.tokens[:-1])  # [rows - 1, K, r]
        first = self._head.markov_w1(bonus)[None]  # [1, 1, r]
        if self._gated:
            first = first * self._gate(hidden[:1], first)
            before = before * self._gate(hidden[1:], before)
        after = self._head.markov_w2.weight[slots.places].float()  # [rows, K, r]
        edges = before.float() @ after[1:].mT
        return (score_pairs(slots, (first.float() @ after[:1].mT)[0, 0], edges),)

    def candidates(self, outputs: Tensors, request: DraftRequest) -> PairLattice:
        return pair_lattice(outputs[0], request.depth)

    def _gate(self, hidden: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """The gate [rows, K, r] of hidden states [rows, H] behind tokens' vectors [rows, K, r]."""
        width, gate = hidden.shape[-1], self._head.gate_proj
        of_rows = functional.linear(hidden, gate.weight[:, :width], gate.bias)
        return (of_rows[:, None] + functional.linear(before, gate.weight[:, width:])).sigmoid()


class MarkovLevels(BlockScores):
    """Scores by a state that goes along the path: a tree that grows level by level."""

    def __init__(self, drafter: DSparkDrafter) -> None:
        self._head, self._drafter = drafter.model.markov_head, drafter
        self._rank = drafter.model.config.rank

    def outputs(
        self, hidden: torch.Tensor, bonus: torch.Tensor, temperature: torch.Tensor
    ) -> Tensors:
        head, rank = self._drafter.head, self._rank
        slots = Slots.of(self._drafter.logits(hidden), GROWN, temperature, head)
        joint = self._head.joint_proj
        of_rows = functional.linear(hidden, joint.weight[:, 2 * rank :], joint.bias)
        after = self._head.markov_w2.weight[slots.places]  # [rows, K, r]

        def step(
            row: int, states: torch.Tensor, tokens: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            paths = torch.cat((states, self._head.markov_w1(tokens)), dim=-1)
            mixed = of_rows[row] + functional.linear(paths, joint.weight[:, : 2 * rank])
            gate, content, output = mixed.chunk(3, dim=-1)
            states = torch.lerp(content.tanh(), states, gate.sigmoid())
            return states, (output.tanh() @ after[row].mT).float()

        state = hidden.new_zeros(1, rank)
        return (grow_levels(slots, step, state, bonus, FRONTIER),)

    def candidates(self, outputs: Tensors, request: DraftRequest) -> CandidateTree:
        return level_tree(outputs[0], request.depth)
