"""A target that writes a prescribed text, so that all arms of a benchmark decode the same one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from decoder.engine import TreeDecoder
from decoder.model.target import Step, Target
from decoder.tree.draft_tree import DraftTree

LARGEST_LOGIT = torch.finfo(torch.float32).max


class GivenTextTarget:
    """A target whose greedy choices follow one text; forwards run and are timed as usual.

    In bfloat16 a forward of one row and one of many round differently, so that near-ties fall
    differently in different arms, whose texts then part. Here the prescribed token always wins,
    at the cost of one assignment a token.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._text: Sequence[int] = ()
        self._cached = 0
        self._forced: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def follow(self, text: Sequence[int]) -> None:
        """Set the text, prompt included, of the next generations."""
        self._text = text

    @torch.inference_mode()
    def prefill(self, token_ids: torch.Tensor, sequence: int = 0) -> torch.Tensor:
        """As `Target.prefill`; logits change only where they disagree with the text."""
        logits = self._target.prefill(token_ids, sequence)
        self._cached = len(token_ids)
        if self._cached < len(self._text) and int(logits.argmax()) != self._text[self._cached]:
            self._force(logits, 0)
        return logits

    @torch.inference_mode()
    def verify(self, steps: Sequence[Step]) -> list[torch.Tensor]:
        """As `Target.verify`, for one sequence."""
        (logits,) = self._target.verify(steps)
        self._force_path(logits, steps[0].tree)
        return [logits]

    def chosen(self) -> NDArray[np.int64] | None:
        """As `Target.chosen`, with the text's tokens on its path."""
        tokens = self._target.chosen()
        if tokens is not None:
            tokens[list(self._forced)] = list(self._forced.values())
        return tokens

    def commit(self, rows: Sequence[int], sequence: int = 0) -> None:
        self._target.commit(rows, sequence)
        self._cached += len(rows)

    def _force_path(self, logits: torch.Tensor, tree: DraftTree) -> None:
        """Force the text's next token in each row on the text's path through the tree."""
        row, depth = 0, 0
        self._forced.clear()
        while row >= 0 and self._force(logits[row], depth + 1):
            self._forced[row] = self._text[self._cached + depth + 1]
            row = tree.child(row, self._text[self._cached + depth + 1])
            depth += 1

    def _force(self, logits: torch.Tensor, ahead: int) -> bool:
        """Make the text's token `ahead` positions after the cached ones win; False at its end."""
        at = self._cached + ahead
        if at >= len(self._text):
            return False
        # Finite in float32 too, in which tokens are chosen.
        logits[self._text[at]] = min(torch.finfo(logits.dtype).max, LARGEST_LOGIT)
        return True


class PlainTexts:
    """Plain decoding's text for each prompt, decoded at its first use."""

    def __init__(self, decoder: TreeDecoder) -> None:
        """decoder  plain decoding with an ordinary target"""
        self._decoder = decoder
        self._texts: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def behind(self, prompt: Sequence[int], new_tokens: int) -> list[int]:
        """The prompt and up to `new_tokens` tokens after it."""
        key = tuple(prompt), new_tokens
        if key not in self._texts:
            written = self._decoder.generate(prompt, max_new_tokens=new_tokens).token_ids
            self._texts[key] = [*prompt, *written]
        return self._texts[key]
