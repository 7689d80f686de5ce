"""The five papers' own figures of an arm, each by its paper's definition.

They count what their authors' code counts: the bonus token of each round, and tokens that the last
round had after the end of the text. A plain arm is what a speed is compared with; every run has
ours, and `transformers:plain` unless it was left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from lab.bench.analysis.figures import stage_shares
from lab.bench.analysis.ratios import responses_of
from lab.bench.record import PLAIN, Response, Result
from lab.papers.dynatree.policy import ConfidentGrowth

BASELINES = ("transformers:plain", PLAIN)
WHY_THEY_DIFFER = (
    "The papers divide by transformers' own generate; the plain step here has packed or captured "
    "forwards and is mostly faster, so that the same trees gain less over it."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperFigures:
    """One arm over one prompt set, or over all; None where the run does not tell.

    tau               tokens a round, over all rounds (BASTION, SpecBlock)
    tau_of_texts      the mean of the responses' own tau (DDTree, DFlash, BlockPilot)
    depth_share       tau over the tree's depth D + 2 (DynaTree's acceptance)
    draft_share       drafting and building in the time of all rounds (SpecBlock's T_D)
    tokens_per_s      of whole calls: the mean over responses (DynaTree)
    tokens_per_s_std  standard deviation of these
    tpot_ratios       mean seconds of a later token of each baseline over the arm's (DDTree,
                      BASTION, BlockPilot)
    call_ratios       tokens/s of whole calls, prefill included, over each baseline's (SpecBlock)
    """

    arm: str
    set: str | None
    tau: float | None
    tau_of_texts: float | None
    depth_share: float | None
    draft_share: float | None
    tokens_per_s: float
    tokens_per_s_std: float
    tpot_ratios: dict[str, float]
    call_ratios: dict[str, float]


def paper_figures(result: Result, arm: str, prompt_set: str | None = None) -> PaperFigures:
    """The figures of one arm, of one prompt set or of all."""
    responses = responses_of(result, arm, prompt_set)
    rounds = [one.rounds for one in responses if one.rounds is not None and one.rounds.count]
    committed = [[accepted + 1 for accepted in one.accepted] for one in rounds]
    tau = fmean(tokens for text in committed for tokens in text) if committed else None
    depth = tree_depth(result.arm(arm).policy)
    shares = stage_shares(responses)
    rates = [one.new_tokens / one.total_s for one in responses if one.total_s > 0]
    bases = {
        name: responses_of(result, name, prompt_set)
        for name in BASELINES
        if any(one.name == name for one in result.arms)
    }
    return PaperFigures(
        arm=arm,
        set=prompt_set,
        tau=tau,
        tau_of_texts=fmean(map(fmean, committed)) if committed else None,
        depth_share=None if tau is None or depth is None else tau / (depth + 2),
        draft_share=shares["draft"] + shares.get("build", 0.0) if "draft" in shares else None,
        tokens_per_s=fmean(rates) if rates else 0.0,
        tokens_per_s_std=pstdev(rates) if rates else 0.0,
        tpot_ratios=_ratios(mean_tpot_s, responses, bases),
        call_ratios=_ratios(call_s_per_token, responses, bases),
    )


def tree_depth(policy: str) -> int | None:
    """DynaTree's D: of a static tree, or D_0 at the start; None for other policies."""
    kind, _, settings = policy.partition(":")
    if kind == "static-tree":
        return int(settings.partition("x")[0])
    if kind != "dynatree":
        return None
    given = re.search(r"\bbase_depth=(\d+)", settings)
    return int(given[1]) if given else ConfidentGrowth().base_depth


def mean_tpot_s(responses: Sequence[Response]) -> float | None:
    """Seconds of a token after the first: the mean of the responses' own."""
    times_s = [one.decode_s / one.decoded_tokens for one in responses if one.decoded_tokens]
    return fmean(times_s) if times_s else None


def call_s_per_token(responses: Sequence[Response]) -> float | None:
    """Seconds of whole calls over all their tokens; updates of a drafter are left out."""
    tokens = sum(one.new_tokens for one in responses)
    return math.fsum(one.total_s for one in responses) / tokens if tokens else None


def _ratios(seconds, responses, bases) -> dict[str, float]:
    own_s = seconds(responses)
    ratios = {name: (seconds(base), own_s) for name, base in bases.items()}
    return {name: base_s / own for name, (base_s, own) in ratios.items() if base_s and own}
