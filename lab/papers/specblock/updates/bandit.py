"""SpecBlock's cost-aware bandit: after each query, whether to update the drafter, and which part.

Algorithm 1 of the SpecBlock paper (3.4, A.3) on plain numbers; `updates.adaptation` carries out
its decisions. README.md has the choices made where the paper leaves one open.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, Protocol

import numpy as np

Action = Literal["skip", "heads", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BanditSettings:
    """The paper's constants (3.4 and A.3); the last two are not given there.

    decay             alpha: of the moving average of rewards
    least_signal      s_min: below it an update's reward is not booked
    actions           that train; ("full",) is the ablation without updates of the heads
    interval_queries  N: queries of the measurement after an update, and of a window
    buffer_queries    queries that fill a buffer
    """

    warmup_queries: int = 10
    cold_start_events: int = 8
    first_epsilon: float = 0.30
    last_epsilon: float = 0.10
    blocked_queries: int = 2
    decay: float = 0.10
    least_signal: float = 5.0
    declining_windows: int = 3
    actions: tuple[Action, ...] = ("heads", "full")
    interval_queries: int = 8
    buffer_queries: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """The figures of one query.

    signal         s (equation 8): the sum over rejected positions of 1 less the drafter's
                   probability of the target's token
    tokens         new tokens without the first, which comes from the prefill
    verifications  rounds of the decode loop
    seconds        of these rounds
    """

    signal: float
    tokens: int
    verifications: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The steps to take after a query, in this order.

    good      make the weights that served at the first query of the window that ends here the
              last good checkpoint
    rollback  restore the last good checkpoint
    action    add the query to this action's buffer
    explored  (the action was drawn)
    train     update with that buffer, which is full, and empty it
    window    begin a window with the weights that serve now
    """

    action: Action = "skip"
    explored: bool = False
    train: bool = False
    good: bool = False
    rollback: bool = False
    window: bool = False


class Updater(Protocol):
    """Decides on updates, query by query."""

    def after(self, query: Query) -> Decision:
        """The decision after a query."""

    def charge(self, seconds: float) -> None:
        """Count the seconds of the update that was just due."""


@dataclass(slots=True)
class _Sums:
    """Sums over some queries."""

    queries: int = 0
    tokens: int = 0
    verifications: int = 0
    seconds: float = 0.0

    def add(self, query: Query) -> None:
        self.queries += 1
        self.tokens += query.tokens
        self.verifications += query.verifications
        self.seconds += query.seconds

    @property
    def throughput(self) -> float:
        """Tokens a second; seconds must be above 0."""
        return self.tokens / self.seconds


@dataclass(slots=True)
class _Interval:
    """The measurement after an update."""

    action: Action
    signal: float
    sums: _Sums = field(default_factory=_Sums)


class Bandit:
    """The cost-aware bandit; draws come from `random`, in a fixed order."""

    def __init__(self, settings: BanditSettings, random: np.random.Generator) -> None:
        self.settings = settings
        self._random = random
        self._warmup = _Sums()
        self._forget()

    def _forget(self) -> None:
        self.values: dict[Action, float] = dict.fromkeys(self.settings.actions, 0.0)
        self.events = 0  # updates so far
        self._held: dict[Action, int] = dict.fromkeys(self.settings.actions, 0)
        self._blocked = 0
        self._interval: _Interval | None = None
        self._window = _Sums()
        self._lengths: list[float] = []

    @property
    def epsilon(self) -> float:
        """The share of queries that explore now: linear over the updates of the cold start."""
        settings = self.settings
        if self.events >= settings.cold_start_events:
            return 0.0
        share = self.events / max(settings.cold_start_events - 1, 1)
        return settings.first_epsilon + share * (settings.last_epsilon - settings.first_epsilon)

    def after(self, query: Query) -> Decision:
        """The decision after a query."""
        if self._warmup.queries < self.settings.warmup_queries:
            self._warmup.add(query)
            return Decision()
        if self._interval is not None:
            self._interval.sums.add(query)
        action, explored = self._choose(query.signal)
        train = self._push(action, query.signal)
        interval = self._interval
        if interval is not None and interval.sums.queries >= self.settings.interval_queries:
            self._book()
        window, good, rollback = self._watch(query)
        if rollback:
            self._forget()
        return Decision(
            action=action,
            explored=explored,
            train=train and not rollback,
            good=good,
            rollback=rollback,
            window=window,
        )

    def charge(self, seconds: float) -> None:
        """Count an update's seconds in the interval that it opened."""
        if self._interval is not None:
            self._interval.sums.seconds += seconds

    def _choose(self, signal: float) -> tuple[Action, bool]:
        """The action of largest predicted gain, or a drawn one; and whether it was drawn."""
        actions = self.settings.actions
        if signal <= 0:
            return "skip", False
        epsilon = self.epsilon
        if epsilon > 0 and self._random.random() < epsilon:
            return actions[int(self._random.integers(len(actions)))], True
        gains = [signal * self.values[action] for action in actions]
        best = int(np.argmax(gains))
        return (actions[best] if gains[best] > 0 else "skip"), False

    def _push(self, action: Action, signal: float) -> bool:
        """Count the query in the action's buffer; whether the buffer is full and fires."""
        blocked = self._blocked > 0
        self._blocked = max(self._blocked - 1, 0)
        if action == "skip":
            return False
        self._held[action] += 1
        if blocked or self._held[action] < self.settings.buffer_queries:
            return False
        if self._interval is not None:
            self._book()
        self._held[action] = 0
        self._blocked = self.settings.blocked_queries
        self._interval = _Interval(action, signal)
        self.events += 1
        return True

    def _book(self) -> None:
        """Close the interval, and add its reward to the value of its action (equation 10)."""
        interval, self._interval = self._interval, None
        if interval is None or interval.signal < self.settings.least_signal:
            return
        if not (interval.sums.seconds > 0 and self._warmup.seconds > 0):
            return  # nothing was decoded, so there is no throughput to compare
        gain = interval.sums.throughput - self._warmup.throughput
        alpha = self.settings.decay
        old = self.values[interval.action]
        self.values[interval.action] = (1 - alpha) * old + alpha * gain / interval.signal

    def _watch(self, query: Query) -> tuple[bool, bool, bool]:
        """Whether a window ends with this query, is good, and ends a decline."""
        self._window.add(query)
        if self._window.queries < self.settings.interval_queries:
            return False, False, False
        done, self._window = self._window, _Sums()
        if done.verifications == 0:
            return True, False, False
        self._lengths.append(done.tokens / done.verifications)
        good = len(self._lengths) == 1 or self._lengths[-1] >= self._lengths[-2]
        last = self._lengths[-self.settings.declining_windows :]
        falls = all(after < before for before, after in pairwise(last))
        return True, good, len(last) == self.settings.declining_windows and falls


class AlwaysUpdate:
    """The baseline: an update of the whole drafter every so many queries.

    Online Speculative Decoding on this drafter updates every eight queries (A.4); every=1 is the
    ablation without the bandit (table 2). It neither measures nor rolls back.
    """

    def __init__(self, every: int = 8) -> None:
        self._every, self._queries = every, 0

    def after(self, query: Query) -> Decision:
        """Buffer the query, and update after every `every` queries."""
        self._queries += 1
        return Decision(action="full", train=self._queries % self._every == 0)

    def charge(self, seconds: float) -> None:
        """Do nothing: costs do not count here."""
