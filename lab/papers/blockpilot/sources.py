"""Samples of block sizes along texts that the target wrote.

The paper decodes every prompt with every block size (BlockPilot, Zhang et al., 2.3). At T = 0 a
text is the same whatever is drafted, so the accepted tokens of a round are those in which the
block drafted at its bonus token agrees with the text. So nothing is decoded here: all blocks of a
text are drafted in one forward, as in training, and the rounds are counted, a hundred times as
fast. Only the seconds of a cycle are measured, by decoding after the first prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from costmodel.errors import InputError
from decoder.drafters.dflash.drafter import DFlashDrafter
from decoder.drafters.dflash.model import DFlashModel
from decoder.engine import TreeDecoder
from decoder.model.target import Target
from lab.papers.blockpilot.drafter import local_candidates
from lab.papers.blockpilot.sweeps import BlockSizeSample, Sweep
from lab.training.corpus import TrainingText
from lab.training.dflash import DFlashObjective, DFlashTraining


class TextSource:
    """The samples of greedy chains along texts with known continuations.

    Raises InputError for a drafter whose blocks cannot be drafted together.
    """

    def __init__(
        self, target: Target, model: DFlashModel, texts: Sequence[TrainingText], sweep: Sweep
    ) -> None:
        if any(model.config.windows) or any(model.config.causal):
            raise InputError(
                "blocks of this drafter see a window or only rows before them, and are drafted "
                "together only where they see all",
                hint="Choose a DFlash drafter with full attention within its blocks.",
            )
        self.prompts = [list(text.tokens[: text.prompt_tokens]) for text in texts]
        self.candidates = local_candidates(model.config.block_size, sweep.radius)
        self._target, self._model, self._texts, self._sweep = target, model, texts, sweep
        vocab = target.architecture.vocab
        head = np.arange(vocab) if model.head_tokens is None else model.head_tokens
        self._objective = DFlashObjective(
            target.loaded, deepcopy(model).float(), DFlashTraining(), torch.from_numpy(head)
        )
        self._cycle_s: torch.Tensor | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that must be equal for a collection to be continued."""
        target, config = self._target, self._model.config
        return {
            "target": target.loaded.name,
            "dtype": str(target.dtype).removeprefix("torch."),
            "drafter_hash": config.hash(target.architecture.vocab),
            "vocab": target.architecture.vocab,
            "block_size": config.block_size,
            "candidates": list(self.candidates),
            **asdict(self._sweep),
        }

    @torch.no_grad()
    def sample(self, number: int) -> BlockSizeSample:
        """The sample of the text with this number, cut where decoding would stop."""
        text, target, length = self._texts[number], self._target, self._sweep.max_new_tokens
        prompt = self.prompts[number]
        if self._cycle_s is None:
            self._cycle_s = self._measured_cycle_s(prompt, length)
        tokens = torch.tensor(text.tokens[: len(prompt) + length], device=target.device)
        target.reserve(len(tokens) + 1)
        logits, features = self._read(tokens[: len(prompt)])
        features = torch.cat((features, self._read(tokens[len(prompt) :])[1]))
        bonus = torch.arange(len(prompt), len(tokens) - 1, device=target.device)
        rounds = torch.tensor(
            [self._rounds(tokens, features, bonus, size) for size in self.candidates]
        )
        return BlockSizeSample(
            prompt=torch.tensor(prompt),
            logits=logits.float().cpu(),
            decoded=torch.full_like(rounds, len(tokens) - len(prompt) - 1),
            rounds=rounds,
            decode_s=rounds * self._cycle_s,
        )

    def _measured_cycle_s(self, prompt: Sequence[int], new_tokens: int) -> torch.Tensor:
        """Seconds of a cycle after one prompt with each candidate [candidates]."""
        cycles_s = []
        for size in self.candidates:
            drafter = DFlashDrafter(self._target, self._model, size)
            decoder = TreeDecoder(self._target, drafter=drafter, policy="chain")
            stats = decoder.generate(prompt, max_new_tokens=new_tokens).stats
            cycles_s.append(stats.decode_s / max(stats.rounds, 1))
        return torch.tensor(cycles_s, dtype=torch.float64)

    def _read(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [vocab] after the next tokens, and their features [tokens, layers * hidden]."""
        logits, features = self._target.prefill(tokens), self._target.features()
        if features is None:
            raise InputError("the hidden states of the target cannot be read")
        return logits.clone(), features.clone()

    def _rounds(
        self, tokens: torch.Tensor, features: torch.Tensor, bonus: torch.Tensor, size: int
    ) -> int:
        """Verifications with this block size, from the first bonus token to the text's end."""
        if len(bonus) == 0:
            return 0
        bfloat16 = self._target.dtype == torch.bfloat16
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=bfloat16):
            accepted = self._objective.accepted(tokens, features, bonus, size).tolist()
        at, count = 0, 0
        while at < len(accepted):
            at, count = at + 1 + accepted[at], count + 1
        return count
