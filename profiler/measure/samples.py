"""Samples of a point: collected one at a time, judged by a stopping rule, corrected for the pace.

An accumulator takes one sample at a time, so that a sweep can mix its points. A drift of the
machine then spreads over all points and does not look like a trend.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

from costmodel.errors import MeasurementError
from costmodel.statistics import (
    MAD_TO_SIGMA,
    Array,
    mad_s,
    relative_error,
    relative_spread,
    typical,
)

Item = TypeVar("Item")
Key = TypeVar("Key")

WARMUP_SIGMAS = 4.0
WARMUP_SHARE = 0.03
REACH = 3  # neighbouring samples on each side that estimate the pace
ITERATIONS = 3  # point medians and paces are estimated in alternation
LEAST_FOR_PACE = 3  # samples; a point with fewer has no usable median


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseRule:
    """Stop when the median is certain enough, when the noise has settled, or at a limit.

    *Noise target met*: the standard error of the median is at most `target` of the median.
    *Noise settled*: there are `settle_samples` or more, and over the last quarter of them the
    spread of single samples stayed within `settle_tolerance` of its present value. More
    samples then lower the error only by the square root of their number.
    *Limit*: `max_samples` attempts or `max_time_s`.
    """

    target: float = 0.005
    min_samples: int = 5
    max_samples: int = 60
    max_time_s: float = float("inf")
    settle_samples: int = 16
    settle_tolerance: float = 0.1

    def stops(self, seconds: Sequence[float], *, attempts: int, spent_s: float) -> bool:
        """
        seconds   accepted samples after the warm-up
        attempts  all samples taken, including warm-up and rejected ones
        spent_s   the sum of the times of all samples
        """
        error, spread = relative_error(seconds), relative_spread(seconds)
        if attempts >= self.max_samples or spent_s >= self.max_time_s:
            return True
        if error is None or len(seconds) < self.min_samples:
            return False
        if error <= self.target:
            return True
        if spread is None or len(seconds) < self.settle_samples:
            return False
        lengths = range(3 * len(seconds) // 4, len(seconds))
        earlier = [relative_spread(seconds[:length]) or 0.0 for length in lengths]
        return all(abs(one - spread) <= self.settle_tolerance * spread for one in earlier)


@dataclass(frozen=True, slots=True, kw_only=True)
class PointSamples:
    """The raw samples of one point in the order taken: accepted, warm-up and rejected."""

    seconds: tuple[float, ...]
    warmup: tuple[float, ...] = ()
    rejected: tuple[float, ...] = ()

    @property
    def n(self) -> int:
        return len(self.seconds)

    @property
    def typical_s(self) -> float:
        return typical(self.seconds)

    @property
    def mad_s(self) -> float | None:
        """Median absolute deviation; None below three samples."""
        return mad_s(self.seconds)


class PointAccumulator:
    """The samples of one point under a stopping rule, added one at a time.

    numbers  of the accepted samples among those of all points
    """

    def __init__(self, rule: NoiseRule) -> None:
        self.rule = rule
        self.accepted: list[float] = []
        self.rejected: list[float] = []
        self.numbers: list[int] = []
        self.done = False

    def add(self, seconds: float, ok: bool = True, number: int = 0) -> None:
        """Add one sample; `ok=False` marks it as disturbed and rejects it."""
        if not seconds > 0:
            raise MeasurementError(f"a timer gave {seconds} s for a call")
        (self.accepted if ok else self.rejected).append(seconds)
        if ok:
            self.numbers.append(number)
        cut = warmup_length(self.accepted)
        still_falling = cut > 0 and cut == len(self.accepted) // 2
        self.done = self.rule.stops(
            () if still_falling else self.accepted[cut:],
            attempts=len(self.accepted) + len(self.rejected),
            spent_s=sum(self.accepted) + sum(self.rejected),
        )

    @property
    def samples(self) -> PointSamples:
        """The samples so far. Raises MeasurementError when none was accepted."""
        if not self.accepted:
            raise MeasurementError(
                f"none of {len(self.rejected)} samples could be used: all were disturbed",
                hint="Stop other work on this machine, let it cool down, and run again.",
            )
        cut, rejected = warmup_length(self.accepted), tuple(self.rejected)
        warmup, seconds = tuple(self.accepted[:cut]), tuple(self.accepted[cut:])
        return PointSamples(seconds=seconds, warmup=warmup, rejected=rejected)


def warmup_length(seconds: Sequence[float]) -> int:
    """The number of leading samples that belong to the warm-up.

    The later half is the reference. A leading sample is warm-up while it exceeds the
    reference's median by more than four standard deviations and by more than 3 %. At most
    half of the samples are cut; exactly half means that the times may still be falling.
    """
    half = len(seconds) // 2
    reference = seconds[half:]
    deviation_s = mad_s(reference)
    if deviation_s is None:
        return 0
    centre_s = median(reference)
    bound_s = centre_s + max(WARMUP_SIGMAS * MAD_TO_SIGMA * deviation_s, WARMUP_SHARE * centre_s)
    return next((index for index in range(half) if seconds[index] <= bound_s), half)


def in_turn(iterators: Mapping[Key, Iterator[Item]]) -> Iterator[tuple[Key, Item]]:
    """One item of each iterator in turn until all have ended, with the iterator's key.

    The order rotates by one place a round, so that none always follows the same other one.
    """
    remaining, rotation = dict(iterators), 1
    while remaining:
        order, first = list(remaining), rotation % len(remaining)
        for key in order[first:] + order[:first]:
            try:
                yield key, next(remaining[key])
            except StopIteration:
                del remaining[key]
        rotation += 1


def paces(seconds: ArrayLike, points: ArrayLike) -> Array:
    """How slow the machine was at each sample, 1 at its typical pace: [samples].

    seconds  [samples] in the order they were taken
    points   int [samples], the point of each sample

    A sample has no say in its own pace, so that a single outlier remains one.
    """
    seconds, points = np.asarray(seconds, np.float64), np.asarray(points, np.int64)
    pace: Array = np.ones_like(seconds)
    if not len(seconds):
        return pace
    usable = np.bincount(points)[points] >= LEAST_FOR_PACE
    medians = np.ones(int(points.max()) + 1)
    shifts = [shift for shift in range(2 * REACH + 1) if shift != REACH]
    for _ in range(ITERATIONS):
        at_pace = seconds / pace
        for point in np.unique(points):
            medians[point] = np.median(at_pace[points == point])
        deviation = np.where(usable, np.log(seconds / medians[points]), np.nan)
        # Up to `REACH` values before and after each one: [2 REACH, samples], NaN past the ends.
        padded = np.pad(deviation, REACH, constant_values=np.nan)
        neighbours = np.stack([padded[shift : shift + len(seconds)] for shift in shifts])
        has_neighbour = ~np.all(np.isnan(neighbours), axis=0)
        pace = np.ones_like(seconds)
        pace[has_neighbour] = np.exp(np.nanmedian(neighbours[:, has_neighbour], axis=0))
        pace /= np.median(pace)
    return pace
