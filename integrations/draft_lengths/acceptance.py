"""Acceptance by draft position, learnt online for each kind of draft; what tells good drafts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

LONGEST_AGREEMENT = 8  # longer ones are treated alike
SPARE = 512  # tokens that a buffer grows by
MOST_PAIRS = 2  # of a draft; more tell nothing further
FIRST_GUESS = 0.5
GUESS_WEIGHT = 6.0  # trials that the guess from the position before counts
SHARED_WEIGHT = 16.0  # trials that the rate of all sequences counts in a single one's
SHARED_MEMORY = 0.999  # of all sequences together, a trial
OWN_MEMORY = 0.97  # of one sequence, a trial
ANY_KIND = 0  # the kind of drafts of which nothing is known


class PositionCounts:
    """Discounted trials and successes at each draft position."""

    def __init__(self, positions: int, memory: float) -> None:
        self.tried = [0.0] * positions
        self.accepted = [0.0] * positions
        self._memory = memory

    def observe(self, position: int, accepted: bool) -> None:
        """One draft token (position from 0) whose predecessors were all accepted."""
        self.tried[position] = self._memory * self.tried[position] + 1.0
        self.accepted[position] = self._memory * self.accepted[position] + accepted


class WaitingDraft:
    """Draft tokens that still wait for the text to show whether they were right."""

    __slots__ = ("draft", "kind", "position")

    def __init__(self, draft: Sequence[int], kind: int) -> None:
        self.draft, self.kind, self.position = draft, kind, 0


class AcceptanceByPosition:
    """The chance that a draft token is accepted, given that those before it were.

    A draft token counts whether or not it was verified: one that was not is compared with the text
    that follows. Greedy text decides that exactly; a drawn token agrees with a draft just as often
    as the draft would have been accepted, where drafts are single tokens without probabilities.

    Drafts come in kinds, such as the length of the matched n-gram. A trial counts for its own kind
    and for ANY_KIND, which stands for a draft that is not made yet.
    """

    def __init__(self, positions: int) -> None:
        self._positions = positions
        self._shared: dict[int, PositionCounts] = {}
        self._own: dict[str, dict[int, PositionCounts]] = {}
        self._none = PositionCounts(positions, OWN_MEMORY)
        self._shadows: dict[str, list[WaitingDraft]] = {}
        self._rates: dict[int, list[float]] = {}

    def rates(self, kind: int = ANY_KIND) -> list[float]:
        """The chance of each position for drafts of a kind, over all sequences: [positions].

        A position without trials has the rate of the last one before it that has some.
        """
        if kind not in self._rates:
            shared, guess, rates = self._shared.get(kind, self._none), FIRST_GUESS, []
            for tried, accepted in zip(shared.tried, shared.accepted, strict=True):
                guess = (accepted + GUESS_WEIGHT * guess) / (tried + GUESS_WEIGHT)
                rates.append(guess)
            self._rates[kind] = rates
        return self._rates[kind]

    def survival(self, sequence: str, kind: int = ANY_KIND) -> list[float]:
        """The chance that a sequence's draft is accepted up to each position: [positions]."""
        own = self._own.get(sequence, {}).get(kind, self._none)
        chance, chances = 1.0, []
        for rate, tried, accepted in zip(self.rates(kind), own.tried, own.accepted, strict=True):
            chance *= (accepted + SHARED_WEIGHT * rate) / (tried + SHARED_WEIGHT)
            chances.append(chance)
        return chances

    def observe_text(
        self, sequence: str, draft: Sequence[int], text: Sequence[int], kind: int = ANY_KIND
    ) -> None:
        """Learn from the tokens of one step, and from the draft that was made before it.

        draft  all drafted tokens, verified or not
        text   the tokens that the step gave
        """
        if not text:
            return
        waiting = self._shadows.pop(sequence, [])
        if draft:
            waiting.append(WaitingDraft(draft, kind))
        still = [shadow for shadow in waiting if self._compare(sequence, shadow, text)]
        if still:
            self._shadows[sequence] = still

    def observe_count(self, sequence: str, drafted: int, accepted: int) -> None:
        """Learn from one verification of which only the counts are known."""
        for position in range(min(accepted + 1, drafted, self._positions)):
            self._count(sequence, ANY_KIND, position, position < accepted)

    def forget(self, sequence: str) -> None:
        """Drop what was kept of a sequence that has ended."""
        self._own.pop(sequence, None)
        self._shadows.pop(sequence, None)

    def _compare(self, sequence: str, shadow: WaitingDraft, text: Sequence[int]) -> bool:
        """Count the draft's tokens against the text; whether some are left to compare."""
        most = min(len(shadow.draft), self._positions)
        for token in text:
            if shadow.position >= most:
                return False
            right = shadow.draft[shadow.position] == token
            for kind in {ANY_KIND, shadow.kind}:
                self._count(sequence, kind, shadow.position, right)
            if not right:
                return False
            shadow.position += 1
        return shadow.position < most

    def _count(self, sequence: str, kind: int, position: int, accepted: bool) -> None:
        own = self._own.setdefault(sequence, {})
        for counts, memory in ((own, OWN_MEMORY), (self._shared, SHARED_MEMORY)):
            if kind not in counts:
                counts[kind] = PositionCounts(self._positions, memory)
            counts[kind].observe(position, accepted)
        self._rates.pop(kind, None)


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
