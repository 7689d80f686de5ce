"""The figures of one arm: speed, acceptance, stage times, errors of its cost model.

A statistic of too few samples is None, not zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np
from scipy.stats import rankdata

from costmodel.statistics import Array
from lab.bench.analysis.ratios import Ratio, compare_arms, rate, responses_of, tally
from lab.bench.record import PLAIN, Response, Result, Rounds

LEAST_ROUNDS = 20  # for a correlation or a quantile of rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Tokens per forward of the target after the prefill, plain steps included.

    Pooled over all responses, and the mean of the responses' own values; with the bonus tokens,
    and of drafted tokens alone. Tokens after the end of a text do not count.
    """

    pooled: float
    mean: float
    pooled_without_bonus: float
    mean_without_bonus: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PathScores:
    """Predicted against realised committed length over rounds with a tree."""

    rounds: int
    predicted_mean: float
    realised_mean: float
    pearson: float | None
    spearman: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CostError:
    """|predicted / measured - 1| of the cost model's seconds; `bias` is its signed median."""

    rounds: int
    median: float | None
    p95: float | None
    bias: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmFigures:
    """One arm over one prompt set, or over all (`set` None).

    ended                    responses that reached an end token
    tokens_per_s             after the first token
    end_to_end_tokens_per_s  of whole calls
    first_token_s            median over responses
    per_token_s              median over responses of the seconds per later token
    differing                responses whose text differs from plain decoding's; None at T > 0
    drafted_share            share of the rounds that had a tree
    draft_time_share         share of drafting in the time of all stages
    bandwidth_share          least possible over measured time; of plain decoding only
    """

    arm: str
    set: str | None
    prompts: int
    responses: int
    new_tokens: int
    ended: int
    tokens_per_s: float | None
    end_to_end_tokens_per_s: float | None
    first_token_s: float
    per_token_s: float | None
    over_plain: Ratio | None
    over_plain_end_to_end: Ratio | None
    differing: int | None
    rounds: int | None
    nodes_mean: float | None
    verification: Verification | None
    drafted_share: float | None
    draft_time_share: float | None
    stage_shares: dict[str, float]
    bandwidth_share: float | None
    path_scores: PathScores | None
    verify_error: CostError | None
    cycle_error: CostError | None

    @property
    def tokens_per_verification(self) -> float | None:
        """Pooled, bonus tokens counted; None for arms that do not report their rounds."""
        return None if self.verification is None else self.verification.pooled


def arm_figures(result: Result, arm: str, prompt_set: str | None = None) -> ArmFigures:
    """The figures of one arm, of one prompt set or of all."""
    responses = responses_of(result, arm, prompt_set)
    texts = [(one, one.rounds) for one in responses if one.rounds is not None]
    rounds = [one for _, one in texts]
    count = sum(one.count for one in rounds)
    drafted = sum(nodes > 0 for one in rounds for nodes in one.nodes)
    stages = stage_shares(responses)
    later = [one.decode_s / one.decoded_tokens for one in responses if one.decoded_tokens > 0]
    return ArmFigures(
        arm=arm,
        set=prompt_set,
        prompts=len({one.prompt for one in responses}),
        responses=len(responses),
        new_tokens=sum(one.new_tokens for one in responses),
        ended=sum(one.finish == "eos" for one in responses),
        tokens_per_s=rate(tally(responses, "decode")),
        end_to_end_tokens_per_s=rate(tally(responses, "total")),
        first_token_s=median(one.first_token_s for one in responses),
        per_token_s=median(later) if later else None,
        over_plain=compare_arms(result, arm, PLAIN, "decode", prompt_set),
        over_plain_end_to_end=compare_arms(result, arm, PLAIN, "total", prompt_set),
        differing=differing(result, arm, prompt_set),
        rounds=count if rounds else None,
        nodes_mean=sum(sum(one.nodes) for one in rounds) / count if count else None,
        verification=verification(texts),
        drafted_share=drafted / count if count else None,
        draft_time_share=stages.get("draft"),
        stage_shares=stages,
        bandwidth_share=bandwidth_share(result, arm, responses),
        path_scores=path_scores(rounds),
        verify_error=cost_error(rounds, "verify_s"),
        cycle_error=cost_error(rounds, "cycle_s"),
    )


def differing(result: Result, arm: str, prompt_set: str | None = None) -> int | None:
    """Responses whose tokens differ from plain decoding's; None where texts are sampled."""
    if result.settings.temperature > 0:
        return None
    pairs = zip(
        responses_of(result, arm, prompt_set), responses_of(result, PLAIN, prompt_set), strict=True
    )
    return sum(response.tokens != plain.tokens for response, plain in pairs)


def verification(texts: Sequence[tuple[Response, Rounds]]) -> Verification | None:
    """Tokens per forward; None where no round was run."""
    counted = [(response, rounds) for response, rounds in texts if rounds.count]
    if not counted:
        return None
    counts = [rounds.count for _, rounds in counted]
    tokens = [response.decoded_tokens for response, _ in counted]
    drafted = []
    for response, rounds in counted:
        emitted = sum(rounds.accepted) + rounds.count
        # Where the text ended within a round's tokens, that round's bonus token was cut off.
        bonus = rounds.count - (emitted > response.decoded_tokens)
        drafted.append(response.decoded_tokens - bonus)
    return Verification(
        pooled=sum(tokens) / sum(counts),
        mean=fmean(t / r for t, r in zip(tokens, counts, strict=True)),
        pooled_without_bonus=sum(drafted) / sum(counts),
        mean_without_bonus=fmean(d / r for d, r in zip(drafted, counts, strict=True)),
    )


def stage_shares(responses: Sequence[Response]) -> dict[str, float]:
    """Each stage's share of the time of all stages; empty where stages were not timed."""
    seconds: dict[str, float] = {}
    for response in responses:
        for name, value in response.stages.items():
            name = name.removesuffix("_s")
            seconds[name] = seconds.get(name, 0.0) + value
    total = math.fsum(seconds.values())
    return {name: value / total for name, value in seconds.items()} if total > 0 else {}


def bandwidth_share(result: Result, arm: str, responses: Sequence[Response]) -> float | None:
    """Least possible over measured time of plain steps; 1 is the memory's read bandwidth."""
    times = [(one.limit_s, one.decode_s) for one in responses if one.limit_s is not None]
    if result.arm(arm).policy != PLAIN or len(times) < len(responses):
        return None
    spent_s = math.fsum(decode_s for _, decode_s in times)
    return math.fsum(limit_s for limit_s, _ in times) / spent_s if spent_s > 0 else None


def path_scores(rounds: Sequence[Rounds]) -> PathScores | None:
    """Path scores against committed lengths; None where no round had a tree."""
    pairs = [
        (expected, accepted + 1)
        for one in rounds
        for expected, accepted, nodes in zip(one.expected, one.accepted, one.nodes, strict=True)
        if nodes
    ]
    if not pairs:
        return None
    predicted, realised = np.array(pairs, dtype=np.float64).T
    enough = len(pairs) >= LEAST_ROUNDS
    return PathScores(
        rounds=len(pairs),
        predicted_mean=float(predicted.mean()),
        realised_mean=float(realised.mean()),
        pearson=_correlation(predicted, realised) if enough else None,
        spearman=_correlation(rankdata(predicted), rankdata(realised)) if enough else None,
    )


def cost_error(rounds: Sequence[Rounds], which: str) -> CostError | None:
    """The error of predicted seconds of `verify_s` or `cycle_s`; None without a cost model."""
    pairs = [
        pair
        for one in rounds
        if (predicted := getattr(one, f"predicted_{which}"))
        for pair in zip(predicted, getattr(one, which), strict=True)
    ]
    errors = np.array([predicted / measured - 1 for predicted, measured in pairs if measured > 0])
    if not len(errors):
        return None
    enough = len(errors) >= LEAST_ROUNDS
    return CostError(
        rounds=len(errors),
        median=float(np.median(np.abs(errors))) if enough else None,
        p95=float(np.quantile(np.abs(errors), 0.95)) if enough else None,
        bias=float(np.median(errors)) if enough else None,
    )


def _correlation(x: Array, y: Array) -> float | None:
    """Pearson's correlation; None where one side is constant."""
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    return float(np.corrcoef(x, y)[0, 1])
