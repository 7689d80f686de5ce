"""A target that writes a given text, so that every arm of a benchmark decodes the same one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from decoder.engine import TreeDecoder
from decoder.target import Step, Target
from decoder.tree import DraftTree


class ForcedTarget:
    """A target whose choices follow one text; all its work is done and timed as ever.

    In bfloat16 a forward of one row and one of many round differently, so a near tie of the
    top two tokens falls differently in different arms, and from there on they would decode
    different texts. Here the recorded token wins every tie. It costs an assignment a token.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._text: Sequence[int] = ()
        self._cached = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def follow(self, text: Sequence[int]) -> None:
        """The text, prompt included, of the generations to come."""
        self._text = text

    @torch.inference_mode()
    def prefill(self, token_ids: torch.Tensor, sequence: int = 0) -> torch.Tensor:
        """As `Target.prefill`; the logits stay as they are where the text agrees with them."""
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

    def commit(self, rows: Sequence[int], sequence: int = 0) -> None:
        self._target.commit(rows, sequence)
        self._cached += len(rows)

    def _force_path(self, logits: torch.Tensor, tree: DraftTree) -> None:
        """In each row on the text's own path, the token that the text goes on with."""
        row, depth = 0, 0
        while row >= 0 and self._force(logits[row], depth + 1):
            row = tree.child(row, self._text[self._cached + depth + 1])
            depth += 1

    def _force(self, logits: torch.Tensor, ahead: int) -> bool:
        """Make the text's token `ahead` positions behind the cached ones win; False at its end."""
        at = self._cached + ahead
        if at >= len(self._text):
            return False
        logits[self._text[at]] = torch.finfo(logits.dtype).max
        return True


class PlainTexts:
    """What plain decoding writes behind each prompt, decoded when it is first asked for."""

    def __init__(self, decoder: TreeDecoder) -> None:
        """decoder  plain decoding with a target that nothing forces"""
        self._decoder = decoder
        self._texts: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def behind(self, prompt: Sequence[int], new_tokens: int) -> list[int]:
        """The prompt, and so many new tokens unless the text ends before."""
        key = tuple(prompt), new_tokens
        if key not in self._texts:
            written = self._decoder.generate(prompt, max_new_tokens=new_tokens).token_ids
            self._texts[key] = [*prompt, *written]
        return self._texts[key]
