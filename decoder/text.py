"""The request of one text, and its tokens turned into text piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from decoder.acceptance.sampling import Sampling
from decoder.processors import Process, token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """The prompt of one text, and its ends.

    ends     tokens that end it
    stream   turns tokens into text; None if only token ids are wanted
    stops    strings that end it
    until    whether it ends after some new tokens, called after each; None: never
    process  changes the logits of every token before it is picked; None: as they are
    """

    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling
    ends: frozenset[int]
    stream: TextStream | None = None
    stops: StopStrings = field(default_factory=lambda: StopStrings(()))
    until: Callable[[Sequence[int]], bool] | None = None
    process: Process | None = None


def end_tokens(model: Any) -> frozenset[int]:
    """The tokens that end a text: those of the generation config, else of the config.

    Raises InputError where they are no token ids.
    """
    for config in (model.generation_config, model.config):
        ids = token_ids(config, "eos_token_id")
        if ids is not None:
            return frozenset(ids)
    return frozenset()


class TextStream:
    """Decodes tokens one by one, and holds back incomplete UTF-8 sequences.

    Decoding starts a few tokens before the new ones, because byte-level and
    sentence-piece tokenizers decode a token differently at the start of a text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._window_start = 0  # of the tokens that are decoded again as context
        self._shown_end = 0  # of the tokens whose text has been returned

    def add(self, token: int) -> str:
        """The text that `token` completes; empty while a character is incomplete."""
        self._ids.append(token)
        before = self._decode(self._ids[self._window_start : self._shown_end])
        whole = self._decode(self._ids[self._window_start :])
        if len(whole) <= len(before) or whole.endswith("\ufffd"):
            return ""
        self._window_start = self._shown_end
        self._shown_end = len(self._ids)
        return whole[len(before) :]

    def finish(self) -> str:
        """The text still held back, after the last token."""
        before = self._decode(self._ids[self._window_start : self._shown_end])
        whole = self._decode(self._ids[self._window_start :])
        self._window_start = self._shown_end = len(self._ids)
        return whole[len(before) :]

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


class StopStrings:
    """Cuts a text, given in pieces, before the first of some strings that is complete.

    hit  whether a stop string was found
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._held = ""
        self.hit = False

    def add(self, piece: str) -> str:
        """Add a piece; returns the text that is certainly before any stop string."""
        self._held += piece
        hits = [
            (start + len(stop), start)
            for stop in self._stops
            if (start := self._held.find(stop)) >= 0
        ]
        if hits:
            self.hit = True
            _, start = min(hits)
            shown, self._held = self._held[:start], ""
            return shown
        end = len(self._held) - self._possible_start()
        shown, self._held = self._held[:end], self._held[end:]
        return shown

    def finish(self) -> str:
        """The text held back as a possible start of a stop string."""
        shown, self._held = self._held, ""
        return shown

    def _possible_start(self) -> int:
        """Length of the longest end of the held text that is the start of a stop string."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
