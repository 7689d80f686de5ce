"""How every block size would have done on texts that the target wrote, without decoding them again.

At T = 0 a text is the same whatever is drafted, so the tokens that a round accepts are those in
which the block drafted at its bonus token agrees with the text. All blocks of a text are drafted
in one forward, as in training; the rounds are then walked through. Decoding the same prompts
takes a hundred times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import numpy as np
import torch

from costmodel.errors import InputError
from decoder.drafters.dflash_model import DFlashModel
from decoder.target import Target
from decoder.training.blockpilot_data import Sample, Sweep
from decoder.training.blockpilot_decoding import Decoding
from decoder.training.corpus import Text
from decoder.training.dflash import DFlashObjective, DFlashTraining


class Known:
    """Samples of texts whose continuation is known; only the cycles' seconds are measured.

    Raises InputError for a sweep that is not greedy or not of the block's single path, which
    the texts say nothing about.
    """

    def __init__(
        self, target: Target, model: DFlashModel, texts: Sequence[Text], sweep: Sweep
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
        self.decoding = Decoding(target, model, [], sweep)
        self.prompts = [list(text.tokens[: text.prompt_tokens]) for text in texts]
        self._texts, self._target, self._length = texts, target, sweep.max_new_tokens
        vocab = target.architecture.vocab
        kept = np.arange(vocab) if model.head_tokens is None else model.head_tokens
        self._objective = DFlashObjective(
            target.loaded, deepcopy(model).float(), DFlashTraining(), torch.from_numpy(kept)
        )
        self._cycle_s: torch.Tensor | None = None

    @property
    def settings(self) -> dict[str, object]:
        """What must be the same for a collection to be gone on with."""
        return self.decoding.settings | {"known": True}

    @torch.no_grad()
    def sample(self, number: int) -> Sample:
        """The text of this number, cut where decoding would stop."""
        text, target = self._texts[number], self._target
        prompt = self.prompts[number]
        if self._cycle_s is None:
            self._cycle_s = self.decoding.cycle_s(prompt, self._length)
        tokens = torch.tensor(text.tokens[: len(prompt) + self._length], device=target.device)
        target.reserve(len(tokens) + 1)
        logits, behind = self._read(tokens[: len(prompt)])
        features = torch.cat((behind, self._read(tokens[len(prompt) :])[1]))
        bonus = torch.arange(len(prompt), len(tokens) - 1, device=target.device)
        rounds = torch.tensor(
            [self._rounds(tokens, features, bonus, size) for size in self.decoding.candidates]
        )
        return Sample(
            prompt=torch.tensor(prompt),
            logits=logits.float().cpu(),
            decoded=torch.full_like(rounds, len(tokens) - len(prompt) - 1),
            rounds=rounds,
            decode_s=rounds * self._cycle_s,
        )

    def _read(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [vocab] behind the next tokens, and features [tokens, layers * hidden] of them."""
        logits, features = self._target.prefill(tokens), self._target.features()
        if features is None:
            raise InputError("the hidden states of the target cannot be read")
        return logits.clone(), features.clone()

    def _rounds(
        self, tokens: torch.Tensor, features: torch.Tensor, bonus: torch.Tensor, size: int
    ) -> int:
        """Verifications of this block size from the first place of a bonus token on."""
        if len(bonus) == 0:
            return 0
        bfloat16 = self._target.dtype == torch.bfloat16
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=bfloat16):
            accepted = self._objective.accepted(tokens, features, bonus, size).tolist()
        at, count = 0, 0
        while at < len(accepted):
            at, count = at + 1 + accepted[at], count + 1
        return count
