"""Rates and paired speed ratios of arms, with bootstrap intervals over prompts.

A rate is all tokens over all seconds: a mean of rates would let short texts count as much as
long ones. Intervals resample prompts, because a benchmark's prompts are a sample; repeats of a
prompt are summed first.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import Literal, TypeVar

import numpy as np
from scipy.special import ndtr, stdtrit

from costmodel.statistics import Array
from lab.bench.record import Response, Result

Part = Literal["decode", "total"]  # after the first token; the whole call and its update
Key = TypeVar("Key", bound=Hashable)
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
    """The speed of one arm over that of another on the same prompts.

    pooled      tokens/s of all prompts together over the other arm's
    low, high   95 % interval of `pooled`; None for fewer than `LEAST_PROMPTS` prompts
    median      of the ratios by prompt; `least` and `most` are their extremes
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
        """`faster` or `slower` where the interval excludes 1, else `undecided`."""
        if self.low is not None and self.low > 1:
            return "faster"
        if self.high is not None and self.high < 1:
            return "slower"
        return "undecided"


def tally(responses: Sequence[Response], part: Part) -> dict[str, Tally]:
    """Tokens and seconds by prompt, in the responses' order.

    `decode` leaves out the first token and the time until it.
    """
    tallies: dict[str, Tally] = {}
    for response in responses:
        before = tallies.get(response.prompt, Tally(0, 0.0))
        whole = part == "total"
        tokens = response.new_tokens if whole else response.decoded_tokens
        seconds = response.occupied_s if whole else response.decode_s
        tallies[response.prompt] = Tally(before.tokens + tokens, before.seconds + seconds)
    return tallies


def tally_arm(
    result: Result, arm: str, part: Part, prompt_set: str | None = None
) -> dict[str, Tally]:
    """Tokens and seconds of an arm by prompt, of one prompt set or of all."""
    return tally(responses_of(result, arm, prompt_set), part)


def responses_of(result: Result, arm: str, prompt_set: str | None = None) -> list[Response]:
    """An arm's responses, to the prompts of one set or to all."""
    if prompt_set is None:
        return list(result.of(arm))
    inside = {prompt.id for prompt in result.prompts if prompt.set == prompt_set}
    return [response for response in result.of(arm) if response.prompt in inside]


def rate(tallies: Mapping[str, Tally]) -> float | None:
    """Tokens per second of all prompts together; None where nothing was decoded."""
    tokens = sum(one.tokens for one in tallies.values())
    seconds = math.fsum(one.seconds for one in tallies.values())
    return tokens / seconds if tokens and seconds > 0 else None


def compare_arms(
    result: Result, arm: str, base: str, part: Part = "decode", prompt_set: str | None = None
) -> Ratio | None:
    """The speed of `arm` over that of `base`; None where nothing was decoded."""
    return paired_ratio(
        tally_arm(result, arm, part, prompt_set), tally_arm(result, base, part, prompt_set)
    )


def paired_ratio(arm: Mapping[Key, Tally], base: Mapping[Key, Tally]) -> Ratio | None:
    """The ratio of two rates over the prompts that both arms decoded; None without any."""
    pairs = [(arm[key], base[key]) for key in arm if key in base]
    table = np.array(
        [
            (one.tokens, one.seconds, other.tokens, other.seconds)
            for one, other in pairs
            if min(one.tokens, other.tokens) > 0 and min(one.seconds, other.seconds) > 0
        ]
    )  # [prompts, 4]
    if not len(table):
        return None
    by_prompt = rate_ratios(table)
    low, high = bootstrap_interval(table) if len(table) >= LEAST_PROMPTS else (None, None)
    return Ratio(
        pooled=float(rate_ratios(table.sum(axis=0))),
        low=low,
        high=high,
        median=float(median(by_prompt.tolist())),
        least=float(by_prompt.min()),
        most=float(by_prompt.max()),
        prompts=len(table),
    )


def bootstrap_interval(table: Array) -> tuple[float, float]:
    """95 % interval of the pooled ratio of [prompts, 4] tokens, seconds, and the base's two.

    A percentile bootstrap over prompts with a fixed seed. Its levels are widened to Student's
    t and for the n / (n - 1) of a resampled variance (Hesterberg, "What teachers should know
    about the bootstrap", 2015), because the plain one is too narrow for few prompts. Needs two
    prompts or more.
    """
    prompts = len(table)
    ratios = rate_ratios(_resamples(prompts) @ table)
    deviations = stdtrit(prompts - 1, (1 - COVERAGE) / 2) * math.sqrt(prompts / (prompts - 1))
    level = float(ndtr(deviations))
    low, high = np.quantile(ratios, (level, 1 - level))
    return float(low), float(high)


def rate_ratios(table: Array) -> Array:
    """[...] ratios of the rates in [..., 4] tokens, seconds, and the base's tokens, seconds."""
    tokens, seconds, base_tokens, base_seconds = np.moveaxis(table, -1, 0)
    ratios: Array = tokens / seconds / (base_tokens / base_seconds)
    return ratios


@lru_cache(maxsize=8)
def _resamples(prompts: int) -> Array:
    """[draws, prompts] counts of each prompt in each resample; the same on every call."""
    random = np.random.default_rng(0)
    counts = random.multinomial(prompts, np.full(prompts, 1 / prompts), size=DRAWS)
    return counts.astype(np.float64)
