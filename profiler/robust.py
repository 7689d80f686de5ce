"""Robust statistics of one set of timing samples, and the warm-up cut.

A statistic of too few samples is None, never zero. Everything is in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

# MAD of a normal distribution times this is its standard deviation (1 / 0.6745).
MAD_TO_SIGMA = 1.4826
# The median's standard error over sigma / sqrt(n) for normal samples: sqrt(pi / 2).
MEDIAN_EFFICIENCY = math.sqrt(math.pi / 2)

MIN_FOR_MAD = 3
WARMUP_SIGMAS = 4.0
WARMUP_SHARE = 0.03


def mad_s(seconds: Sequence[float]) -> float | None:
    """Median absolute deviation from the median; None with fewer than three samples."""
    if len(seconds) < MIN_FOR_MAD:
        return None
    centre_s = median(seconds)
    return median([abs(value - centre_s) for value in seconds])


def median_interval_s(
    seconds: Sequence[float], coverage: float = 0.95
) -> tuple[float, float] | None:
    """Distribution-free interval of the median from order statistics.

    The interval [x_(k), x_(n+1-k)] misses the median when fewer than k samples fall on one
    side of it, a Binomial(n, 1/2) event; k is the largest with at least `coverage`
    (David and Nagaraja, Order Statistics, 7.1). None where even the whole range covers too
    little: below six samples at 95 %.
    """
    count = len(seconds)
    tail, below = (1 - coverage) / 2, 0.0
    rank = 0
    for successes in range(count // 2):
        below += math.comb(count, successes) / 2**count
        if below > tail:
            break
        rank = successes + 1
    if rank == 0:
        return None
    ordered = sorted(seconds)
    return ordered[rank - 1], ordered[count - rank]


def relative_spread(seconds: Sequence[float]) -> float | None:
    """Standard deviation of one sample over the median, estimated from the MAD."""
    deviation_s = mad_s(seconds)
    if deviation_s is None:
        return None
    return MAD_TO_SIGMA * deviation_s / median(seconds)


def relative_error(seconds: Sequence[float]) -> float | None:
    """Standard error of the median over the median, estimated from the MAD."""
    spread = relative_spread(seconds)
    if spread is None:
        return None
    return MEDIAN_EFFICIENCY * spread / math.sqrt(len(seconds))


def warmup_length(seconds: Sequence[float]) -> int:
    """How many leading samples belong to the warm-up: those still falling towards the rest.

    The later half is the reference. A leading sample is warm-up while it lies above the
    reference's median by more than four standard deviations and more than 3 %. At most half
    of the samples are cut; a result of exactly half means that they may be falling still.
    """
    half = len(seconds) // 2
    reference = seconds[half:]
    deviation_s = mad_s(reference)
    if deviation_s is None:
        return 0
    centre_s = median(reference)
    bound_s = centre_s + max(WARMUP_SIGMAS * MAD_TO_SIGMA * deviation_s, WARMUP_SHARE * centre_s)
    for index in range(half):
        if seconds[index] <= bound_s:
            return index
    return half
