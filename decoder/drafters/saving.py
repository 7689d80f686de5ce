"""When the dearer of two drafters is left out of a round."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

import numpy as np

EDGES = np.array([0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0])  # classes of what the first promises
LEAST_ROUNDS = 8  # of a class with both drafters, before it is judged
RETRY_ROUNDS = 8  # rounds without the second drafter before it is tried again
FADING = 0.95  # a round
# Of the tokens that a draft's time is worth, it must add less than this: the first drafter's
# paths would not all have been verified, and few rounds say what the second adds.
MARGIN = 0.25
TIMES = 32  # the latest, of which the median counts
LEAST_TIMES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """A round that was drafted.

    expected   tokens that the first drafter alone promised
    followed   tokens that really were a path of its candidates
    committed  tokens of the round, the bonus included
    first_s    time of the first drafter
    draft_s    time of the second drafter, None where it was left out
    verify_s   the rest of the round's time
    """

    expected: float
    followed: int
    committed: int
    first_s: float
    draft_s: float | None
    verify_s: float


class Saving:
    """Leaves the second drafter out where it adds fewer tokens than its time is worth.

    What it adds is learnt by how much the first drafter promises: the tokens accepted in
    rounds with both, less those that the first one's candidates held. Time is worth the
    tokens that recent rounds committed in it, and `MARGIN` of them are enough to go on. Of a
    batch, the drafts of other texts count as verification, so the second drafter is left out
    less often there.

    share  time of a second draft over that of the rest of a round; None: measured as it runs
    """

    def __init__(self, share: float | None = None) -> None:
        self._share = share
        self._first_s: deque[float] = deque(maxlen=TIMES)
        self._draft_s: deque[float] = deque(maxlen=TIMES)
        self._verify_s: deque[float] = deque(maxlen=TIMES)
        self._rounds = np.zeros(len(EDGES) + 1)
        self._gained = np.zeros(len(EDGES) + 1)
        self._seen = np.zeros(len(EDGES) + 1, np.int64)
        self._committed = 0.0
        self._spent = 0.0  # verifications' time of these tokens

    def share(self) -> float:
        """Time of a second draft over that of the rest of a round; 0 before it is known."""
        if self._share is not None:
            return self._share
        if min(len(self._draft_s), len(self._verify_s)) < LEAST_TIMES:
            return 0.0
        return median(self._draft_s) / median(self._verify_s)

    def part(self) -> float:
        """Of a whole draft's time, what one without the second drafter takes; 1 at first."""
        if min(len(self._first_s), len(self._draft_s)) < LEAST_TIMES:
            return 1.0
        first_s = median(self._first_s)
        return first_s / (first_s + median(self._draft_s))

    def saves(self, expected: float, saved: int) -> bool:
        """Whether to draft without the second drafter, the first promising so many tokens.

        saved  rounds of this text since the second drafter's last one
        """
        place = int(np.searchsorted(EDGES, expected))
        if saved >= RETRY_ROUNDS or self._seen[place] < LEAST_ROUNDS:
            return False
        gain = self._gained[place] / self._rounds[place]
        return bool(gain < MARGIN * self.share() * self._committed / self._spent)

    def observe(self, done: Round) -> None:
        """Learn from a round."""
        self._first_s.append(done.first_s)
        self._verify_s.append(done.verify_s)
        spent = 1.0
        if done.draft_s is not None:
            self._draft_s.append(done.draft_s)
            spent += self.share()
            place = int(np.searchsorted(EDGES, done.expected))
            gained = max(done.committed - 1 - done.followed, 0)
            self._seen[place] += 1
            self._rounds[place] = self._rounds[place] * FADING + 1.0
            self._gained[place] = self._gained[place] * FADING + gained
        self._committed = self._committed * FADING + done.committed
        self._spent = self._spent * FADING + spent
