"""One text in progress: its tokens, its drafting, and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from decoder.acceptance.choice import AcceptanceRule
from decoder.acceptance.sampling import Sampling
from decoder.drafters.base import Drafter, LogitReader, PartialSession
from decoder.statistics import Statistics
from decoder.text import StopStrings, TextStream


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """What one text is asked for.

    stream  turns tokens into text; None where only token ids are wanted
    ends    the tokens that end it
    until   whether it ends after some new tokens, asked at each of them; None: never
    """

    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling
    stream: TextStream | None
    stops: StopStrings
    ends: frozenset[int]
    until: Callable[[Sequence[int]], bool] | None = None


class TextSequence:
    """One text in progress.

    number  of the text among all that its decoder has begun
    place   its sequence in the target's cache
    reader  its drafting session where that looks at the target's logits, else None
    partial  the same where its drafts may leave a part out, else None
    """

    def __init__(
        self,
        request: TextRequest,
        drafter: Drafter,
        stats: Statistics,
        rule: AcceptanceRule,
        number: int,
        place: int,
    ) -> None:
        self.number = number
        self.place = place
        self.token_ids: list[int] = []
        self.stats = stats
        self.session = drafter.session()
        # Asked once: looking for a method this way takes as long as building a tree.
        self.reader = self.session if isinstance(self.session, LogitReader) else None
        self.partial = self.session if isinstance(self.session, PartialSession) else None
        self.rule = rule
        self.sampling = request.sampling
        self._request = request
        prompt = len(request.prompt)
        self._tokens = np.empty(prompt + request.max_new_tokens + 1, dtype=np.int64)
        self._tokens[:prompt] = request.prompt
        self._length = prompt
        stats.prompt_tokens = prompt

    @property
    def context(self) -> NDArray[np.int64]:
        """Prompt and emitted tokens; the last one is the bonus, not yet in the cache."""
        return self._tokens[: self._length]

    @property
    def cached(self) -> int:
        return self._length - 1

    @property
    def wanted(self) -> int:
        """Tokens still to come."""
        return self._request.max_new_tokens - len(self.token_ids)

    @property
    def ended(self) -> bool:
        return bool(self.stats.finish)

    def take(self, emitted: Sequence[int]) -> Iterator[str]:
        """Add tokens until the text ends; the pieces of text they complete."""
        for token in emitted:
            if self.ended:
                return
            self._tokens[self._length] = token
            self._length += 1
            self.token_ids.append(token)
            self.stats.new_tokens = len(self.token_ids)
            piece = self._text(token)
            if not self.ended:
                self.stats.finish = self._finish(token)
            if piece:
                yield piece
        if self.ended and self.stats.finish != "stop" and self._request.stream is not None:
            stops = self._request.stops
            rest = stops.add(self._request.stream.finish()) + stops.finish()
            if rest:
                yield rest

    def interrupt(self) -> None:
        """Say so where the text is left before its end."""
        if not self.ended:
            self.stats.finish = "interrupted"

    def _text(self, token: int) -> str:
        if self._request.stream is None:
            return ""
        piece = self._request.stops.add(self._request.stream.add(token))
        if self._request.stops.hit:
            self.stats.finish = "stop"
        return piece

    def _finish(self, token: int) -> str:
        if token in self._request.ends:
            return "eos"
        if self._request.until is not None and self._request.until(self.token_ids):
            return "stop"
        return "length" if self.wanted <= 0 else ""


def end_tokens(model: Any) -> frozenset[int]:
    """The ids that end a text: the generation config's, else the config's."""
    for config in (model.generation_config, model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
