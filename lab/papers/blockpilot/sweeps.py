"""Sweeps of block sizes over texts, the training data of BlockPilot's predictor.

The paper decodes every prompt with every block size (Zhang et al., "BlockPilot", 2.3). At T = 0 a
text is the same whatever is drafted, so the accepted tokens of a round are those in which the
block drafted at its bonus token agrees with the text. So nothing is decoded here: all blocks of a
text that the target wrote are drafted in one forward, as in training, and the rounds are counted,
a hundred times as fast. Only the seconds of a cycle are measured, by decoding after one prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from costmodel.errors import InputError
from decoder.drafters.dflash.drafter import DFlashDrafter
from decoder.drafters.dflash.model import DFlashModel, trainable_copy
from decoder.engine import TreeDecoder
from decoder.model.target import Target
from lab.papers.blockpilot.drafter import RADIUS, local_candidates
from lab.training.corpus import TrainingText
from lab.training.dflash import DFlashObjective, DFlashTraining

# The criterion for the best block size: the acceptance length (equation 3 of the paper), or the
# acceptance length over the time of a cycle (equation 1).
Best = Literal["length", "rate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The settings of a sweep.

    radius          k: candidates are B - k..B + k
    max_new_tokens  of each text
    template        options of the chat template of new texts
    """

    radius: Annotated[int, Field(ge=1, le=64)] = RADIUS
    max_new_tokens: Annotated[int, Field(ge=2)] = 256
    template: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSizeSample:
    """One prompt of a sweep.

    logits    float32 [vocab] of the target after the prompt
    decoded   int64 [candidates]: new tokens without the first, which comes from the prefill
    rounds    int64 [candidates]: verifications
    decode_s  float64 [candidates]: seconds of these
    """

    logits: torch.Tensor
    decoded: torch.Tensor
    rounds: torch.Tensor
    decode_s: torch.Tensor

    @property
    def lengths(self) -> torch.Tensor | None:
        """tau [candidates], tokens a verification with the bonus token; None without any."""
        if int(self.rounds.min()) == 0:
            return None
        return self.decoded.double() / self.rounds.double()


class Sweeper:
    """Makes the sample of each text.

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
            target.loaded, trainable_copy(model), DFlashTraining(), torch.from_numpy(head)
        )
        self._cycle_s: torch.Tensor | None = None

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


def cycle_s(samples: Sequence[BlockSizeSample]) -> torch.Tensor:
    """Seconds of a cycle with each candidate [candidates], pooled over all prompts.

    The times of one prompt are noisy, and a cycle takes nearly the same after any prompt.
    """
    spent_s = torch.stack([sample.decode_s for sample in samples]).sum(0)
    return spent_s / torch.stack([sample.rounds for sample in samples]).sum(0)


def best_candidates(samples: Sequence[BlockSizeSample], best: Best = "length") -> torch.Tensor:
    """The label of each sample [samples]: the index of its best candidate; -1 without one.

    Among equals the smallest block is the best, as in the published code (AMAP-ML/BlockPilot,
    data_analysis/max_value_counter.py). A text that ended with its first token has no label.
    """
    costs = cycle_s(samples) if best == "rate" else 1.0
    labels = []
    for sample in samples:
        lengths = sample.lengths
        labels.append(-1 if lengths is None else int((lengths / costs).numpy().argmax()))
    return torch.tensor(labels)
