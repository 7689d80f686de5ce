"""Pairs of neighbouring tokens in a text, which tell drafts that fit it from others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

MOST_PAIRS = 2  # of a draft; more tell nothing further


class SeenPairs:
    """The pairs of neighbouring tokens in a sequence so far.

    A draft whose tokens have followed each other in the text before is right far more often.
    """

    def __init__(self) -> None:
        self._pairs: set[tuple[int, int]] = set()
        self._last: list[int] = []  # the last token, once there is one
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def extend(self, tokens: Sequence[int]) -> None:
        text = [*self._last, *tokens]
        self._pairs.update(pairwise(text))
        self._last = text[-1:]
        self._count += len(tokens)

    def kind(self, draft: Sequence[int]) -> int:
        """1, and 1 more for each leading token that follows the one before it in the text too."""
        kind = 1
        for pair in pairwise([*self._last, *draft[:MOST_PAIRS]]):
            if pair not in self._pairs:
                break
            kind += 1
        return kind
