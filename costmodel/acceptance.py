"""Acceptance of a simulated drafter: its process, and those that published lengths imply.

At each drafted position a confidence c is drawn. It is the probability that the drafter's first
token is the target's, and the lower ranks follow from it:

    h_1 = c,   h_j = min(h_(j-1) / (1 - h_(j-1)), tail / j)   for ranks j = 2, 3, ...

where h_j is the probability of rank j, given that the ranks before it are wrong. The first bound
keeps the probabilities descending; the second makes the tail fall as a power of the rank. With tail
0.73, of the tokens that a confident drafter misses, 61 % are at ranks 2-4 and 19 % at 5-10;
SpecBlock (table 3) counted 60 % and 17 %. The published trees of DFlash imply tails of 0.2 to 0.35.
The target's tokens are drawn from these probabilities, so a simulated drafter is calibrated.

`published_acceptance.csv` holds acceptance lengths that papers report for DFlash drafters (blocks
of 16): those of the `chain` and of the paper's best-first `tree` of `tree_nodes`, and the `tail` of
the process that reproduces both. `bastion` is table 1 of the BASTION paper (A100), `ddtree` table 1
of the DDTree paper (arXiv 2604.12989, H200). Neither gives the nodes line by line: DDTree names 512
for one line, which is used for all of its lines; for BASTION's controller 256 is assumed, and its
trees at temperature 1 accept by the argmax, which is not lossless. A chain's length determines one
rate for all depths; neither paper gives acceptance by depth.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from typing import Literal

import numpy as np

from costmodel.errors import InputError
from costmodel.statistics import Array

Kind = Literal["published", "recorded", "given"]

# A softmax over a real vocabulary hardly ever gives its first token a lower probability.
LEAST_CONFIDENCE = 0.05
# Gives the correlation 0.79-0.82 of predicted and accepted length that BASTION reports for
# MATH500 (appendix H.1) at the acceptance of that data set.
CONCENTRATION = 0.35
TAIL = 0.3  # about the median of the published data sets
QUANTILES = 512  # equally likely confidences of a depth
MOST_POSITIONS = 10_000  # of a draft; real drafters draft up to some 60


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceProcess:
    """A drafter's acceptance by depth.

    label          the source of the figures, for readers of results
    kind           `published`, `recorded` or `given`
    rank1          acceptance of the first token at depth 1, 2, ... given all before it,
                   each in (0, 1]; one for each drafted position
    concentration  a + b of the Beta(a, b) that confidences are drawn from: small for
                   confidences near 0 and 1, infinite for a constant confidence
    tail           0 .. 2: the larger, the more of the missed tokens have the next ranks
    """

    label: str
    kind: Kind
    rank1: tuple[float, ...]
    concentration: float = CONCENTRATION
    tail: float = TAIL

    @property
    def gamma(self) -> int:
        return len(self.rank1)

    def rank_table(self, width: int) -> Array:
        """Probabilities of the ranks at each confidence, [gamma, QUANTILES, width]."""
        hazard = self.confidences()
        left = np.ones_like(hazard)
        table = np.empty((*hazard.shape, width))
        for rank in range(width):
            table[..., rank] = left * hazard
            left = left - table[..., rank]
            with np.errstate(divide="ignore"):
                rising = np.where(hazard < 0.5, hazard / (1.0 - hazard), 1.0)
            hazard = np.minimum(rising, self.tail / (rank + 2))
        return table

    def confidences(self) -> Array:
        """Equally likely confidences of each depth, [gamma, QUANTILES]; their mean is `rank1`."""
        by_rate = {rate: _confidences(rate, self.concentration) for rate in set(self.rank1)}
        return np.stack([by_rate[rate] for rate in self.rank1])


def constant(chain_length: float, gamma: int = 15) -> AcceptanceProcess:
    """The same acceptance at every depth, such that the chain commits `chain_length` a round.

    BlockPilot (eq. 24) models block drafters by one rate too, and published tables give one
    length a data set. Raises InputError for a length outside 1 .. gamma + 1.
    """
    if gamma < 1 or not 1.0 < chain_length < gamma + 1:
        raise InputError(
            f"a chain of {gamma} drafted tokens cannot commit {chain_length} tokens a round"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        too_short = sum(rate**depth for depth in range(gamma + 1)) < chain_length
        low, high = (rate, high) if too_short else (low, rate)
    label = f"chain of {chain_length:g} tokens"
    return AcceptanceProcess(label=label, kind="given", rank1=(high,) * gamma)


def recorded(accepted: Sequence[int], drafted: Sequence[int], *, label: str) -> AcceptanceProcess:
    """Acceptance by depth from the rounds of recorded chains.

    accepted, drafted  tokens of each round; rounds without a draft are ignored
    Depths that no round reached get the rate of the depth before, and a rate of 0 becomes half an
    observation. Raises InputError where nothing was drafted.
    """
    hit_depth, draft_depth = np.asarray(accepted), np.asarray(drafted)
    alike = hit_depth.ndim == 1 and hit_depth.shape == draft_depth.shape
    if not alike or np.any((hit_depth > draft_depth) | (hit_depth < 0)):
        raise InputError("each round needs the tokens it accepted and the as many or more drafted")
    deepest = int(draft_depth.max(initial=0))
    if deepest > MOST_POSITIONS:
        raise InputError(f"a draft has at most {MOST_POSITIONS} positions, not {deepest}")
    rates: list[float] = []
    for depth in range(1, deepest + 1):
        visits = int(np.sum((hit_depth >= depth - 1) & (draft_depth >= depth)))
        hits = int(np.sum(hit_depth >= depth))
        if visits:
            rates.append(max(hits, 0.5) / visits if hits < visits else 1.0)
        elif rates:
            rates.append(rates[-1])
    if not rates:
        raise InputError("no round drafted anything: there is no acceptance to record")
    return AcceptanceProcess(label=label, kind="recorded", rank1=tuple(rates))


def _confidences(rate: float, concentration: float) -> Array:
    """Means of equally likely parts of LEAST + (1 - LEAST) x Beta, whose mean is `rate`."""
    from scipy.special import betainc, betaincinv  # slow to import, needed here only

    mean = (rate - LEAST_CONFIDENCE) / (1.0 - LEAST_CONFIDENCE)
    # This near to the least confidence the variation is lost in rounding: use a constant.
    if not 0.001 < mean < 1.0 or np.isinf(concentration):
        return np.full(QUANTILES, rate)
    a, b = mean * concentration, (1.0 - mean) * concentration
    at = np.linspace(0.0, 1.0, QUANTILES + 1)
    # The first moment of Beta(a, b) below x is mean x the distribution of Beta(a + 1, b). The
    # upper half is counted from 1 down: most of its mass lies too close to 1 for x to resolve.
    below, above = betaincinv(a, b, at), betaincinv(b, a, 1.0 - at)
    parts = np.where(
        below[1:] <= 0.5,
        QUANTILES * mean * np.diff(betainc(a + 1.0, b, below)),
        1.0 + QUANTILES * (1.0 - mean) * np.diff(betainc(b + 1.0, a, above)),
    )
    confidences = LEAST_CONFIDENCE + (1.0 - LEAST_CONFIDENCE) * np.clip(parts, 0.0, 1.0)
    return np.asarray(confidences, dtype=np.float64)


BLOCK_GAMMA = 15  # positions that the published drafters draft: block size 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """One line of a paper's table."""

    table: str
    target: str
    temperature: int
    dataset: str
    chain: float
    tree: float
    tree_nodes: int
    tail: float

    @property
    def label(self) -> str:
        return f"{self.table} table 1, {self.target}, {self.dataset}, T = {self.temperature}"


def published_rows() -> list[PublishedRow]:
    text = files("costmodel").joinpath("published_acceptance.csv").read_text(encoding="utf-8")
    kinds = {"temperature": int, "tree_nodes": int, "chain": float, "tree": float, "tail": float}
    return [
        PublishedRow(**{name: kinds.get(name, str)(cell) for name, cell in line.items()})
        for line in csv.DictReader(text.splitlines())
    ]


def process_of(row: PublishedRow) -> AcceptanceProcess:
    """The process that reproduces both lengths of a line."""
    rate = constant(row.chain, BLOCK_GAMMA).rank1
    return AcceptanceProcess(label=row.label, kind="published", rank1=rate, tail=row.tail)


def conditional_rates(survival: Sequence[float] | Array) -> list[float]:
    """The rate of each position, given those before it; 0 behind one that was never accepted."""
    return [float(now / before) if before else 0.0 for before, now in pairwise([1.0, *survival])]
