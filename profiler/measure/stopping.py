"""Stopping rules: whether one point has been timed enough, and the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from costmodel.statistics import MIN_FOR_MAD, relative_error, relative_spread

NOISE_TARGET_MET = "noise target met"
NOISE_SETTLED = "noise settled"
LIMIT = "limit"
RUNNING = "running"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether to stop, the reason, and the unmet condition (empty when all are met)."""

    done: bool
    reason: str = RUNNING
    unmet: str = ""


class StoppingRule(Protocol):
    """Decides from the samples of a point whether to stop timing it."""

    def check(self, seconds: Sequence[float], *, attempts: int, spent_s: float) -> Verdict:
        """
        seconds   accepted samples after the warm-up
        attempts  all samples taken, including warm-up and rejected ones
        spent_s   the sum of the times of all samples
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseRule:
    """Stop when the median is certain enough, when the noise has settled, or at a limit.

    *Noise target met*: the standard error of the median is at most `target` of the median.
    *Noise settled*: there are `settle_samples` or more, and over the last quarter of them the
    spread of single samples stayed within `settle_tolerance` of its present value. More
    samples then lower the error only by the square root of their number.
    *Limit*: `max_samples` attempts or `max_time_s`; the verdict names the unmet condition.
    """

    target: float = 0.005
    min_samples: int = 5
    max_samples: int = 60
    max_time_s: float = float("inf")
    settle_samples: int = 16
    settle_tolerance: float = 0.1

    def __post_init__(self) -> None:
        if not MIN_FOR_MAD <= self.min_samples <= self.max_samples:
            raise ValueError(
                f"min_samples must lie in {MIN_FOR_MAD}..max_samples, not {self.min_samples}"
            )

    def check(self, seconds: Sequence[float], *, attempts: int, spent_s: float) -> Verdict:
        error = relative_error(seconds)
        enough = error is not None and len(seconds) >= self.min_samples
        if enough and error is not None and error <= self.target:
            return Verdict(done=True, reason=NOISE_TARGET_MET)
        if enough and self._settled(seconds):
            return Verdict(done=True, reason=NOISE_SETTLED, unmet=self._unmet(seconds))
        if attempts >= self.max_samples or spent_s >= self.max_time_s:
            return Verdict(done=True, reason=LIMIT, unmet=self._unmet(seconds))
        return Verdict(done=False, unmet=self._unmet(seconds))

    def _settled(self, seconds: Sequence[float]) -> bool:
        if len(seconds) < self.settle_samples:
            return False
        latest = relative_spread(seconds)
        if latest is None:
            return False
        first = 3 * len(seconds) // 4
        spreads = [relative_spread(seconds[:count]) for count in range(first, len(seconds))]
        return all(
            spread is not None and abs(spread - latest) <= self.settle_tolerance * latest
            for spread in spreads
        )

    def _unmet(self, seconds: Sequence[float]) -> str:
        error = relative_error(seconds)
        if error is None or len(seconds) < self.min_samples:
            return f"{len(seconds)} steady samples of at least {self.min_samples}"
        return f"error of the median {error:.2%}, target {self.target:.2%}"
