"""Sweeps of block sizes over texts, the training data of BlockPilot's predictor.

The paper decodes every prompt with every block size (Zhang et al., "BlockPilot", 2.3). At T = 0 a
text is the same whatever is drafted, so the accepted tokens of a round are those in which the
block drafted at its bonus token agrees with the text. At other temperatures the walk rule draws
the target's token at every position and goes on while the block has it, so the same holds along a
text that the target sampled, and all sizes see the same draws. So blocks of a text that the target
wrote are drafted together, as in training, and the rounds are counted. Only the seconds of a round
are measured, by decoding after one prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field, NonNegativeFloat
from torch.nn import functional

from costmodel.errors import InputError
from decoder.drafters.dflash.drafter import DFlashDrafter
from decoder.drafters.dflash.model import DFlashModel
from decoder.engine import TreeDecoder
from decoder.model.target import Target
from lab.papers.blockpilot.drafter import LEAST_BLOCK, RADIUS, Input, local_candidates
from lab.training.corpus import TrainingText
from lab.training.dflash import DFlashObjective, DFlashTraining, trainable_copy

# The criterion for the best block size: the acceptance length (equation 3 of the paper), or the
# acceptance length over the time of a cycle (equation 1).
Best = Literal["length", "rate"]
MOST_ROWS = 4096  # drafted together


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The settings of a sweep.

    radius          k: candidates are B - k..B + k
    max_new_tokens  of each text
    template        options of the chat template of new texts
    temperature     of the texts; at 0 they are greedy
    input           that the predictor reads
    """

    radius: Annotated[int, Field(ge=1, le=64)] = RADIUS
    max_new_tokens: Annotated[int, Field(ge=2)] = 256
    template: dict[str, Any] = field(default_factory=dict)
    temperature: NonNegativeFloat = 0.0
    input: Input = "logits"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSizeSample:
    """One prompt of a sweep.

    input    float32 [width]: the target's logits or hidden states after the prompt
    decoded  new tokens without the first, which comes from the prefill
    rounds   int64 [candidates]: verifications
    """

    input: torch.Tensor
    decoded: int
    rounds: torch.Tensor

    @property
    def lengths(self) -> torch.Tensor | None:
        """tau [candidates], tokens a verification with the bonus token; None without any."""
        if int(self.rounds.min()) == 0:
            return None
        return self.decoded / self.rounds.double()


class Sweeper:
    """Makes the sample of each text.

    cycle_s  float64 [1 + candidates]: seconds of a round of plain decoding, and with each block
             size, from the first sample on
    Raises InputError for a drafter whose blocks cannot be drafted together.
    """

    def __init__(
        self, target: Target, model: DFlashModel, texts: Sequence[TrainingText], sweep: Sweep
    ) -> None:
        if any(window or causal for window, causal in model.config.kinds):
            raise InputError(
                "blocks of this drafter see a window or only rows before them, and are drafted "
                "together only where they see all",
                hint="Choose a DFlash drafter with full attention within its blocks.",
            )
        self.prompts = [list(text.tokens[: text.prompt_tokens]) for text in texts]
        self.candidates = local_candidates(model.config.block_size, sweep.radius)
        self._target, self._model, self._texts, self._sweep = target, model, texts, sweep
        self._objective = DFlashObjective(
            target.loaded, trainable_copy(model), DFlashTraining(), target.head_weight()
        )
        self.cycle_s: torch.Tensor | None = None

    @torch.no_grad()
    def sample(self, number: int) -> BlockSizeSample:
        """The sample of the text with this number, cut where decoding would stop."""
        text, target, length = self._texts[number], self._target, self._sweep.max_new_tokens
        prompt = self.prompts[number]
        if self.cycle_s is None:
            self.cycle_s = self._measured_cycle_s(prompt)
        tokens = torch.tensor(text.tokens[: len(prompt) + length], device=target.device)
        target.reserve(len(tokens) + 1)
        logits, features = self._read(tokens[: len(prompt)])
        last = features[-1]
        features = torch.cat((features, self._read(tokens[len(prompt) :])[1]))
        bonus = torch.arange(len(prompt), len(tokens) - 1, device=target.device)
        rounds = torch.tensor(
            [self._rounds(tokens, features, bonus, size) for size in self.candidates]
        )
        return BlockSizeSample(
            input=(last if self._sweep.input == "hidden" else logits).float().cpu(),
            decoded=len(tokens) - len(prompt) - 1,
            rounds=rounds,
        )

    def _measured_cycle_s(self, prompt: Sequence[int]) -> torch.Tensor:
        cycles_s, sweep = [], self._sweep
        for size in (1, *self.candidates):
            drafter = DFlashDrafter(self._target, self._model, max(size, LEAST_BLOCK))
            policy = "plain" if size == 1 else "chain"
            decoder = TreeDecoder(self._target, drafter=drafter, policy=policy, acceptance="walk")
            stats = decoder.generate(
                prompt, max_new_tokens=sweep.max_new_tokens, temperature=sweep.temperature
            ).stats
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
            accepted = [
                length
                for anchors in bonus.split(max(MOST_ROWS // size, 1))
                for length in self._objective.accepted(tokens, features, anchors, size).tolist()
            ]
        at, count = 0, 0
        while at < len(accepted):
            at, count = at + 1 + accepted[at], count + 1
        return count


def best_candidates(
    samples: Sequence[BlockSizeSample], cycle_s: torch.Tensor | None = None
) -> torch.Tensor:
    """The label of each sample [samples]: the index of its best candidate; -1 without one.

    cycle_s  [candidates], for the best acceptance length over the time of a cycle
    Among equals the smallest block is the best, as in the published code (AMAP-ML/BlockPilot,
    data_analysis/max_value_counter.py). A text that ended with its first token has no label.
    """
    costs = 1.0 if cycle_s is None else cycle_s
    labels = []
    for sample in samples:
        lengths = sample.lengths
        labels.append(-1 if lengths is None else int((lengths / costs).numpy().argmax()))
    return torch.tensor(labels)


def by_block_size(
    samples: Sequence[BlockSizeSample], candidates: Sequence[int], cycle_s: torch.Tensor
) -> list[dict[str, float]]:
    """Figure 3 of the paper: a block of 1, which is plain decoding, and each candidate.

    Of each the mean acceptance length, the speed-up over plain decoding (equation 2), and the
    share of prompts for which its acceptance length is the best, of equals the smallest block.
    cycle_s  [1 + candidates], as `Sweeper.cycle_s`
    """
    names = ("block_size", "length", "over_plain", "best_for")
    lengths = [sample.lengths for sample in samples if sample.lengths is not None]
    table = functional.pad(torch.stack(lengths), (1, 0), value=1.0)  # [samples, 1 + candidates]
    best = np.bincount(table.numpy().argmax(1), minlength=len(cycle_s)) / len(table)
    speeds = table.mean(0) * cycle_s[0] / cycle_s
    columns = ((1, *candidates), table.mean(0).tolist(), speeds.tolist(), best.tolist())
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
