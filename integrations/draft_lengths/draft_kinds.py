"""Kinds of drafts by how well they fit the text before them: n-gram matches and seen pairs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

LONGEST_AGREEMENT = 8  # longer ones are treated alike
SPARE = 512  # tokens that a buffer grows by
MOST_PAIRS = 2  # of a draft; more tell nothing further


class MatchedText:
    """A sequence's tokens so far, searched as an engine's n-gram drafter searches them.

    The drafter takes the longest n-gram at the text's end that occurs before, and of its places
    the first (vLLM's `NgramProposer`). The more tokens agree there, the more of the draft is right.
    """

    def __init__(self, least: int, most: int) -> None:
        """Of the n-grams `least` to `most` tokens long."""
        self._least, self._most = least, most
        self._tokens = np.empty(SPARE, np.int32)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def extend(self, tokens: Sequence[int]) -> None:
        count = self._count + len(tokens)
        if count > len(self._tokens):
            self._tokens = np.resize(self._tokens, count + SPARE)
        self._tokens[self._count : count] = tokens
        self._count = count

    def kind(self, draft: Sequence[int]) -> int:
        """Tokens that agree before the draft and before its source; 0 where nothing matches."""
        text = self._tokens[: self._count]
        last = len(text) - 1
        places = np.flatnonzero(text[:-1] == text[-1])  # where a matching n-gram may end
        for length in range(1, self._most):
            longer = places[places >= length]
            longer = longer[text[longer - length] == text[last - length]]
            if len(longer) == 0:
                if length < self._least:
                    return 0
                break
            places = longer
        if len(places) == 0:
            return 0
        end = int(places[0])
        agreed = 1
        while (
            agreed < min(LONGEST_AGREEMENT, end + 1) and text[end - agreed] == text[last - agreed]
        ):
            agreed += 1
        return agreed


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
