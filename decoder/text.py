"""Token ids to text, a piece at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class TextStream:
    """Decodes tokens as they come, holding back incomplete UTF-8 sequences.

    Decoding starts a few tokens before the new ones, because byte-level and
    sentence-piece tokenizers render a token differently at the start of a text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._window_start = 0  # decoded again each time, for the new tokens' context
        self._shown_end = 0  # tokens whose text has been given out

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
        """The text still held back, once no more tokens come."""
        before = self._decode(self._ids[self._window_start : self._shown_end])
        whole = self._decode(self._ids[self._window_start :])
        self._window_start = self._shown_end = len(self._ids)
        return whole[len(before) :]

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


class StopStrings:
    """Cuts a text before whichever of some strings is complete first, however it is pieced."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._held = ""
        self.hit = False

    def add(self, piece: str) -> str:
        """The part of the text that is certainly before any stop string."""
        self._held += piece
        found = [
            (start + len(stop), start)
            for stop in self._stops
            if (start := self._held.find(stop)) >= 0
        ]
        if found:
            self.hit = True
            _, start = min(found)
            shown, self._held = self._held[:start], ""
            return shown
        keep = self._possible_start()
        shown, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        return shown

    def finish(self) -> str:
        """What was held back as a possible start of a stop string."""
        shown, self._held = self._held, ""
        return shown

    def _possible_start(self) -> int:
        """Length of the longest end of the held text that begins some stop string."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
