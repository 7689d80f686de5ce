"""How every block size does on prompts, by decoding them (BlockPilot, Zhang et al., 2.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from decoder.drafters.blockpilot_model import local_candidates
from decoder.drafters.dflash import DFlashDrafter
from decoder.drafters.dflash_model import DFlashModel
from decoder.engine import TreeDecoder
from decoder.statistics import Statistics
from decoder.target import Target
from decoder.training.blockpilot_data import Sample, Sweep


class Decoding:
    """Every prompt decoded with every candidate block size.

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
        """What must be the same for a collection to be gone on with."""
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

    def sample(self, number: int) -> Sample:
        """The prompt of this number, decoded."""
        target, sweep = self._target, self._sweep
        ids = list(self.prompts[number])
        self._decoders[0].check(ids, sweep.max_new_tokens)
        target.reserve(len(ids) + 1)
        logits = target.prefill(torch.tensor(ids, device=target.device)).float().cpu()
        stats = self._stats(ids, sweep.max_new_tokens, sweep.seed + number)
        return Sample(
            prompt=torch.tensor(ids),
            logits=logits,
            decoded=torch.tensor([own.new_tokens - 1 for own in stats]),
            rounds=torch.tensor([own.rounds for own in stats]),
            decode_s=torch.tensor([own.decode_s for own in stats], dtype=torch.float64),
        )

    def cycle_s(self, prompt: Sequence[int], new_tokens: int) -> torch.Tensor:
        """Seconds of a cycle behind one prompt with each candidate [candidates]."""
        stats = self._stats(prompt, new_tokens, self._sweep.seed)
        return torch.tensor(
            [own.decode_s / max(own.rounds, 1) for own in stats], dtype=torch.float64
        )

    def _stats(self, prompt: Sequence[int], new_tokens: int, seed: int) -> list[Statistics]:
        temperature = self._sweep.temperature
        return [
            decoder.generate(
                prompt, max_new_tokens=new_tokens, temperature=temperature, seed=seed
            ).stats
            for decoder in self._decoders
        ]
