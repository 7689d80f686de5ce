"""Rates and paired ratios of arms, prompt by prompt, with bootstrap intervals.

Tokens over seconds, summed over prompts: a mean of rates would let short texts count as much
as long ones. Intervals are over prompts, which are what a benchmark draws from; repeats of a
prompt are summed before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, stdtrit

from profiler.bench.record import Response, Result

Part = Literal["decode", "total"]  # from the first token on; the whole call and its update
LEAST_PROMPTS = 5  # for an interval
DRAWS = 5_000
COVERAGE = 0.95


@dataclass(frozen=True, slots=True)
class Tally:
    """Tokens of one prompt and the seconds they took, over all repeats."""

    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """How many times as fast one arm is as another on the same prompts.

    pooled      tokens/s of all prompts together over that of the other
    low, high   95 % interval of it; None for fewer than `LEAST_PROMPTS` prompts
    median      of the ratios prompt by prompt, with the least and the largest of them
    """

    pooled: float
    low: float | None
    high: float | None
    median: float
    least: float
    most: float
    prompts: int

    @property
    def verdict(self) -> Literal["faster", "slower", "undecided"]:
        """What the interval says; undecided without one."""
        if self.low is not None and self.low > 1:
            return "faster"
        if self.high is not None and self.high < 1:
            return "slower"
        return "undecided"


def tally(responses: Sequence[Response], part: Part) -> dict[str, Tally]:
    """By prompt, in their order. `decode` leaves out the first token and its time."""
    found: dict[str, Tally] = {}
    for response in responses:
        known = found.get(response.prompt, Tally(0, 0.0))
        whole = part == "total"
        tokens = response.new_tokens if whole else response.decoded_tokens
        seconds = response.occupied_s if whole else response.decode_s
        found[response.prompt] = Tally(known.tokens + tokens, known.seconds + seconds)
    return found


def tallies(
    result: Result, arm: str, part: Part, prompt_set: str | None = None
) -> dict[str, Tally]:
    """The same of an arm, of one prompt set or of all."""
    return tally(responses_of(result, arm, prompt_set), part)


def responses_of(result: Result, arm: str, prompt_set: str | None = None) -> list[Response]:
    """An arm's responses, to the prompts of one set or to all."""
    if prompt_set is None:
        return list(result.of(arm))
    inside = {prompt.id for prompt in result.prompts if prompt.set == prompt_set}
    return [response for response in result.of(arm) if response.prompt in inside]


def rate(tallied: Mapping[str, Tally]) -> float | None:
    """Tokens per second of all prompts together; None where nothing was decoded."""
    tokens = sum(one.tokens for one in tallied.values())
    seconds = math.fsum(one.seconds for one in tallied.values())
    return tokens / seconds if tokens and seconds > 0 else None


def compare_arms(
    result: Result, arm: str, base: str, part: Part = "decode", prompt_set: str | None = None
) -> Ratio | None:
    """How many times as fast `arm` is as `base`; None where nothing was decoded."""
    ours, theirs = (tallies(result, name, part, prompt_set) for name in (arm, base))
    return paired_ratio(ours, theirs)


def paired_ratio(ours: Mapping[str, Tally], theirs: Mapping[str, Tally]) -> Ratio | None:
    """The ratio of rates over the prompts that both decoded; None without any.

    The interval is the percentile bootstrap over prompts, fixed seed, its levels widened to
    Student's t and for the n / (n - 1) of a resampled variance (Hesterberg, "What teachers
    should know about the bootstrap", 2015): the plain one is too narrow for few prompts.
    """
    shared = [
        name
        for name in ours
        if name in theirs
        and min(ours[name].tokens, theirs[name].tokens) > 0
        and min(ours[name].seconds, theirs[name].seconds) > 0
    ]
    if not shared:
        return None
    table = np.array(
        [
            (ours[name].tokens, ours[name].seconds, theirs[name].tokens, theirs[name].seconds)
            for name in shared
        ]
    )  # [prompts, 4]
    each = _ratios(table)
    low, high = _interval(table)
    return Ratio(
        pooled=float(_ratios(table.sum(axis=0))),
        low=low,
        high=high,
        median=float(median(each.tolist())),
        least=float(each.min()),
        most=float(each.max()),
        prompts=len(shared),
    )


def _interval(table: NDArray[np.float64]) -> tuple[float | None, float | None]:
    """table: [prompts, 4] of our tokens and seconds, and theirs."""
    prompts = len(table)
    if prompts < LEAST_PROMPTS:
        return None, None
    low, high = np.quantile(_ratios(_resampled(prompts) @ table), _levels(prompts))
    return float(low), float(high)


@lru_cache(maxsize=8)
def _resampled(prompts: int) -> NDArray[np.float64]:
    """[draws, prompts] how often each prompt is in a resample; always the same draws."""
    random = np.random.default_rng(0)
    counts = random.multinomial(prompts, np.full(prompts, 1 / prompts), size=DRAWS)
    return counts.astype(np.float64)


def _levels(prompts: int) -> tuple[float, float]:
    """The quantiles of the bootstrap that make a 95 % interval for so many prompts."""
    deviations = stdtrit(prompts - 1, (1 - COVERAGE) / 2) * math.sqrt(prompts / (prompts - 1))
    level = float(ndtr(deviations))
    return level, 1 - level


def _ratios(table: NDArray[np.float64]) -> NDArray[np.float64]:
    tokens, seconds, base_tokens, base_seconds = np.moveaxis(table, -1, 0)
    ratios: NDArray[np.float64] = tokens / seconds / (base_tokens / base_seconds)
    return ratios
