"""Sources of block-size samples: prompts that are decoded, or texts with known continuations.

The paper decodes every prompt with every block size (BlockPilot, Zhang et al., 2.3). At T = 0 a
text is the same whatever is drafted, so the accepted tokens of a round are those in which the
block drafted at its bonus token agrees with the text. Known texts need no decoding then: all
blocks are drafted in one forward, as in training, and the rounds are counted, a hundred times as
fast.
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
from decoder.statistics import Statistics
from lab.papers.blockpilot.drafter import local_candidates
from lab.papers.blockpilot.sweeps import BlockSizeSample, Sweep
from lab.training.corpus import TrainingText
from lab.training.dflash import DFlashObjective, DFlashTraining


class DecodingSource:
    """Samples from decoding every prompt with every candidate block size.

    prompts  token ids, chat template included
    """

    def __init__(
        self,
        target: Target,
        model: DFlashModel,
        prompts: Sequence[Sequence[int]],
        sweep: Sweep,
    ) -> None:
        self.prompts = prompts
        self.candidates = local_candidates(model.config.block_size, sweep.radius)
        self._target, self._model, self._sweep = target, model, sweep
        self._decoders = [
            TreeDecoder(target, drafter=DFlashDrafter(target, model, size), policy=sweep.policy)
            for size in self.candidates
        ]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that must be equal for a collection to be continued."""
        target, model = self._target, self._model
        return {
            "target": target.loaded.name,
            "dtype": str(target.dtype).removeprefix("torch."),
            "drafter_hash": model.config.hash(target.architecture.vocab),
            "vocab": target.architecture.vocab,
            "block_size": model.config.block_size,
            "candidates": list(self.candidates),
            **asdict(self._sweep),
        }

    def sample(self, number: int) -> BlockSizeSample:
        """The sample of the prompt with this number."""
        target, sweep = self._target, self._sweep
        ids = list(self.prompts[number])
        self._decoders[0].check(ids, sweep.max_new_tokens)
        target.reserve(len(ids) + 1)
        logits = target.prefill(torch.tensor(ids, device=target.device)).float().cpu()
        stats = self._stats(ids, sweep.max_new_tokens, sweep.seed + number)
        return BlockSizeSample(
            prompt=torch.tensor(ids),
            logits=logits,
            decoded=torch.tensor([counts.new_tokens - 1 for counts in stats]),
            rounds=torch.tensor([counts.rounds for counts in stats]),
            decode_s=torch.tensor([counts.decode_s for counts in stats], dtype=torch.float64),
        )

    def cycle_s(self, prompt: Sequence[int], new_tokens: int) -> torch.Tensor:
        """Seconds of a cycle after one prompt with each candidate [candidates]."""
        stats = self._stats(prompt, new_tokens, self._sweep.seed)
        return torch.tensor(
            [counts.decode_s / max(counts.rounds, 1) for counts in stats], dtype=torch.float64
        )

    def _stats(self, prompt: Sequence[int], new_tokens: int, seed: int) -> list[Statistics]:
        temperature = self._sweep.temperature
        return [
            decoder.generate(
                prompt, max_new_tokens=new_tokens, temperature=temperature, seed=seed
            ).stats
            for decoder in self._decoders
        ]


class KnownTextSource:
    """Samples from texts with known continuations; only the cycles' seconds are measured.

    Raises InputError for a sweep that samples or verifies trees, for which the texts do not
    tell the accepted tokens.
    """

    def __init__(
        self, target: Target, model: DFlashModel, texts: Sequence[TrainingText], sweep: Sweep
    ) -> None:
        if sweep.temperature > 0 or sweep.policy != "chain":
            raise InputError(
                "known texts say how greedy chains do, and nothing of other policies or sampling",
                hint="Give --prompts, which are decoded.",
            )
        if any(model.config.windows) or any(model.config.causal):
            raise InputError(
                "blocks of this drafter see a window or only rows before them, and are drafted "
                "together only where they see all",
                hint="Give --prompts, which are decoded.",
            )
        self.decoding = DecodingSource(target, model, [], sweep)
        self.prompts = [list(text.tokens[: text.prompt_tokens]) for text in texts]
        self._texts, self._target, self._length = texts, target, sweep.max_new_tokens
        vocab = target.architecture.vocab
        head = np.arange(vocab) if model.head_tokens is None else model.head_tokens
        self._objective = DFlashObjective(
            target.loaded, deepcopy(model).float(), DFlashTraining(), torch.from_numpy(head)
        )
        self._cycle_s: torch.Tensor | None = None

    @property
    def settings(self) -> dict[str, object]:
        """The settings that must be equal for a collection to be continued."""
        return self.decoding.settings | {"known": True}

    @torch.no_grad()
    def sample(self, number: int) -> BlockSizeSample:
        """The sample of the text with this number, cut where decoding would stop."""
        text, target = self._texts[number], self._target
        prompt = self.prompts[number]
        if self._cycle_s is None:
            self._cycle_s = self.decoding.cycle_s(prompt, self._length)
        tokens = torch.tensor(text.tokens[: len(prompt) + self._length], device=target.device)
        target.reserve(len(tokens) + 1)
        logits, features = self._read(tokens[: len(prompt)])
        features = torch.cat((features, self._read(tokens[len(prompt) :])[1]))
        bonus = torch.arange(len(prompt), len(tokens) - 1, device=target.device)
        rounds = torch.tensor(
            [self._rounds(tokens, features, bonus, size) for size in self.decoding.candidates]
        )
        return BlockSizeSample(
            prompt=torch.tensor(prompt),
            logits=logits.float().cpu(),
            decoded=torch.full_like(rounds, len(tokens) - len(prompt) - 1),
            rounds=rounds,
            decode_s=rounds * self._cycle_s,
        )

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
