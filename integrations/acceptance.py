"""Acceptance by draft position, learnt online for each kind of draft and each sequence."""

from __future__ import annotations

from collections.abc import Sequence

FIRST_GUESS = 0.5
GUESS_WEIGHT = 6.0  # trials that the guess from the position before counts
SHARED_WEIGHT = 16.0  # trials that the rate of all sequences counts in a single one's
SHARED_MEMORY = 0.999  # of all sequences together, a trial
OWN_MEMORY = 0.97  # of one sequence, a trial
ANY_KIND = 0  # the kind of drafts of which nothing is known, at the shortest contexts
SHORT_CONTEXT = 512  # tokens; above it each doubling has rates of its own
NEIGHBOUR_TRIALS = 32.0  # at most, of those that a range of contexts starts with


def kind_at(context: float) -> int:
    """The kind of drafts of which nothing but the context is known: ANY_KIND or below.

    Drafters are trained on texts of some length; behind longer ones fewer drafts are accepted.
    """
    return ANY_KIND - (int(context) // SHORT_CONTEXT).bit_length()


class PositionCounts:
    """Discounted trials and successes at each draft position."""

    def __init__(self, positions: int, memory: float) -> None:
        self.tried = [0.0] * positions
        self.accepted = [0.0] * positions
        self._memory = memory

    def lighter(self, most: float) -> PositionCounts:
        """A copy with the same rates and at most so many trials at each position."""
        copy = PositionCounts(len(self.tried), self._memory)
        for position, tried in enumerate(self.tried):
            share = min(1.0, most / tried) if tried else 0.0
            copy.tried[position] = share * tried
            copy.accepted[position] = share * self.accepted[position]
        return copy

    def observe(self, position: int, accepted: bool) -> None:
        """One draft token (position from 0) whose predecessors were all accepted."""
        self.tried[position] = self._memory * self.tried[position] + 1.0
        self.accepted[position] = self._memory * self.accepted[position] + accepted


class Shadow:
    """Draft tokens that still wait for the text to show whether they were right."""

    __slots__ = ("draft", "kinds", "position")

    def __init__(self, draft: Sequence[int], kinds: set[int]) -> None:
        self.draft, self.kinds, self.position = draft, kinds, 0


class AcceptanceByPosition:
    """The chance that a draft token is accepted, given that those before it were.

    A draft token counts whether or not it was verified: one that was not is compared with the text
    that follows. Greedy text decides that exactly; a drawn token agrees with a draft just as often
    as the draft would have been accepted, where drafts are single tokens without probabilities.

    Drafts come in kinds, such as the length of the matched n-gram. A trial counts for its own kind
    and for that of its context (`kind_at`), which stands for a draft that is not made yet. A range
    of contexts starts with what is known of the nearest one.
    """

    def __init__(self, positions: int) -> None:
        self._positions = positions
        self._shared: dict[int, PositionCounts] = {}
        self._own: dict[str, dict[int, PositionCounts]] = {}
        self._none = PositionCounts(positions, OWN_MEMORY)
        self._shadows: dict[str, list[Shadow]] = {}
        self._rates: dict[int, list[float]] = {}

    def rates(self, kind: int = ANY_KIND) -> list[float]:
        """The chance of each position for drafts of a kind, over all sequences: [positions].

        A position without trials has the rate of the last one before it that has some.
        """
        if kind not in self._rates:
            shared, guess, rates = self._shared_counts(kind), FIRST_GUESS, []
            for tried, accepted in zip(shared.tried, shared.accepted, strict=True):
                guess = (accepted + GUESS_WEIGHT * guess) / (tried + GUESS_WEIGHT)
                rates.append(guess)
            self._rates[kind] = rates
        return self._rates[kind]

    def survival(self, sequence: str, kind: int = ANY_KIND) -> list[float]:
        """The chance that a sequence's draft is accepted up to each position: [positions]."""
        own = self._own.get(sequence, {}).get(max(kind, ANY_KIND), self._none)
        chance, chances = 1.0, []
        for rate, tried, accepted in zip(self.rates(kind), own.tried, own.accepted, strict=True):
            chance *= (accepted + SHARED_WEIGHT * rate) / (tried + SHARED_WEIGHT)
            chances.append(chance)
        return chances

    def observe_text(
        self,
        sequence: str,
        draft: Sequence[int],
        text: Sequence[int],
        *,
        context: float,
        kind: int = ANY_KIND,
    ) -> None:
        """Learn from the tokens of one step, and from the draft that was made before it.

        draft    all drafted tokens, verified or not
        text     the tokens that the step gave
        context  cached tokens before the step
        """
        if not text:
            return
        waiting = self._shadows.pop(sequence, [])
        if draft:
            waiting.append(Shadow(draft, {kind_at(context), kind or kind_at(context)}))
        still = [shadow for shadow in waiting if self._compare(sequence, shadow, text)]
        if still:
            self._shadows[sequence] = still

    def observe_count(self, sequence: str, drafted: int, accepted: int, *, context: float) -> None:
        """Learn from one verification of which only the counts are known."""
        for position in range(min(accepted + 1, drafted, self._positions)):
            self._count(sequence, kind_at(context), position, position < accepted)

    def forget(self, sequence: str) -> None:
        """Drop what was kept of a sequence that has ended."""
        self._own.pop(sequence, None)
        self._shadows.pop(sequence, None)

    def _compare(self, sequence: str, shadow: Shadow, text: Sequence[int]) -> bool:
        """Count the draft's tokens against the text; whether some are left to compare."""
        most = min(len(shadow.draft), self._positions)
        for token in text:
            if shadow.position >= most:
                return False
            right = shadow.draft[shadow.position] == token
            for kind in shadow.kinds:
                self._count(sequence, kind, shadow.position, right)
            if not right:
                return False
            shadow.position += 1
        return shadow.position < most

    def _count(self, sequence: str, kind: int, position: int, accepted: bool) -> None:
        own, own_kind = self._own.setdefault(sequence, {}), max(kind, ANY_KIND)
        if own_kind not in own:
            own[own_kind] = PositionCounts(self._positions, OWN_MEMORY)
        own[own_kind].observe(position, accepted)
        self._shared_counts(kind).observe(position, accepted)
        self._rates.pop(kind, None)

    def _shared_counts(self, kind: int) -> PositionCounts:
        """The counts of all sequences, made at the first question."""
        counts = self._shared.get(kind)
        if counts is None:
            ranges = [known for known in self._shared if known <= ANY_KIND]
            if kind <= ANY_KIND and ranges:
                nearest = self._shared[min(ranges, key=lambda known: abs(known - kind))]
                counts = nearest.lighter(NEIGHBOUR_TRIALS)
            else:
                counts = PositionCounts(self._positions, SHARED_MEMORY)
            self._shared[kind] = counts
        return counts
