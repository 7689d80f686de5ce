"""The gate of an ensemble: whether a round drafts with the dearer drafter too."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

import numpy as np

EDGES = np.array([0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0])  # of the tokens that the first expects
LEAST_ROUNDS = 8  # with both drafters in a class of expected tokens, before it is judged
RETRY_ROUNDS = 8  # rounds without the second drafter before it is tried again
FADING = 0.95  # factor of old counts a round
# The second drafter is left out where it adds fewer tokens than this share of what its time is
# worth: the first drafter's paths would not all have been verified, and few rounds tell what the
# second one adds.
MARGIN = 0.25
TIMES = 32  # the latest, of which the median counts
LEAST_TIMES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsembleRound:
    """One drafted round of an ensemble.

    expected   tokens that the first drafter's own candidates promised
    followed   emitted tokens that were a path of these candidates
    committed  tokens of the round, the bonus token included
    first_s    time of the first drafter
    second_s   time of the second drafter, None where it was left out
    verify_s   the rest of the round's time
    """

    expected: float
    followed: int
    committed: int
    first_s: float
    second_s: float | None
    verify_s: float


class EnsembleGate:
    """Leaves the second drafter out where it adds fewer tokens than its time is worth.

    The tokens it adds are estimated by class of what the first drafter expects: those accepted
    in rounds with both drafters, less those on the first one's own paths. Time is worth the
    tokens that recent rounds committed in as much of it. In a batch the drafts of other texts
    count as verification, so the second drafter is left out less often there.

    second_share  time of a second draft over the rest of a round; None to measure it
    """

    def __init__(self, second_share: float | None = None) -> None:
        self._fixed_share = second_share
        self._first_s: deque[float] = deque(maxlen=TIMES)
        self._second_s: deque[float] = deque(maxlen=TIMES)
        self._verify_s: deque[float] = deque(maxlen=TIMES)
        self._rounds = np.zeros(len(EDGES) + 1)  # with both drafters, by class, fading
        self._gained = np.zeros(len(EDGES) + 1)  # tokens that the second one added in them
        self._seen = np.zeros(len(EDGES) + 1, np.int64)  # the rounds, without fading
        self._committed = 0.0
        self._spent = 0.0  # time of these tokens, in verifications

    def second_share(self) -> float:
        """Time of a second draft over the rest of a round; 0 before it is known."""
        if self._fixed_share is not None:
            return self._fixed_share
        if min(len(self._second_s), len(self._verify_s)) < LEAST_TIMES:
            return 0.0
        return median(self._second_s) / median(self._verify_s)

    def first_share(self) -> float:
        """Time of the first draft over that of both; 1 before it is known."""
        if min(len(self._first_s), len(self._second_s)) < LEAST_TIMES:
            return 1.0
        first_s = median(self._first_s)
        return first_s / (first_s + median(self._second_s))

    def skips(self, expected: float, skipped: int) -> bool:
        """Whether to leave the second drafter out of a round.

        expected  tokens that the first drafter's candidates promise
        skipped   rounds of this text since the second drafter's last one
        """
        place = int(np.searchsorted(EDGES, expected))
        if skipped >= RETRY_ROUNDS or self._seen[place] < LEAST_ROUNDS:
            return False
        gain = self._gained[place] / self._rounds[place]
        return bool(gain < MARGIN * self.second_share() * self._committed / self._spent)

    def observe(self, done: EnsembleRound) -> None:
        """Count a round."""
        self._first_s.append(done.first_s)
        self._verify_s.append(done.verify_s)
        spent = 1.0
        if done.second_s is not None:
            self._second_s.append(done.second_s)
            spent += self.second_share()
            place = int(np.searchsorted(EDGES, done.expected))
            gained = max(done.committed - 1 - done.followed, 0)
            self._seen[place] += 1
            self._rounds[place] = self._rounds[place] * FADING + 1.0
            self._gained[place] = self._gained[place] * FADING + gained
        self._committed = self._committed * FADING + done.committed
        self._spent = self._spent * FADING + spent
