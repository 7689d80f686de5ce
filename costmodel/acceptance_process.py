"""How often a simulated drafter is right, and how sure it says it is.

At each position of a drafted block a confidence c is drawn; c is the probability that the
drafter's first token is the target's, and the lower ranks follow from it:

    h_1 = c,   h_j = min(h_(j-1) / (1 - h_(j-1)), tail / j)   for ranks j = 2, 3, ...

with h_j the chance of rank j when the ranks before it are wrong. The first bound keeps the
probabilities descending, the second gives a tail that falls as a power of the rank: at tail
0.73, of the tokens that a sure drafter misses, 61 % are at ranks 2-4 and 19 % at 5-10;
SpecBlock (table 3) counted 60 % and 17 % for its drafter. The published trees of DFlash ask
for 0.2 to 0.35: what it misses lies farther down. The truth is drawn from the very
probabilities that the block states, so a simulated drafter is calibrated; a real one need
not be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from costmodel.errors import InputError

Kind = Literal["published", "recorded", "given"]

# A softmax over a real vocabulary hardly ever gives its first token less.
LEAST_CONFIDENCE = 0.05
# Reproduces the correlation 0.79-0.82 of predicted and accepted length that BASTION reports
# (appendix H.1, MATH500) at that data set's acceptance.
CONCENTRATION = 0.35
TAIL = 0.3  # about the median of the published data sets
QUANTILES = 512  # confidences a depth that are told apart


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceProcess:
    """A drafter's acceptance, depth by depth.

    label          where the figures come from, for a reader of results
    kind           `published`, `recorded` or `given`
    rank1          acceptance of the first token at depth 1, 2, ... given all before it,
                   each in (0, 1]; as many as positions are drafted
    concentration  a + b of the Beta(a, b) that confidences are drawn from: small where the
                   drafter is either sure or lost, infinite where it is always equally sure
    tail           0 .. 2: how much of the rest lies at the ranks just below the first
    """

    label: str
    kind: Kind
    rank1: tuple[float, ...]
    concentration: float = CONCENTRATION
    tail: float = TAIL

    def __post_init__(self) -> None:
        if not self.rank1 or not all(0.0 < rate <= 1.0 for rate in self.rank1):
            raise InputError(
                f"acceptance by depth must be one or more rates above 0, at most 1: {self.rank1}"
            )
        if not self.concentration > 0.0:
            raise InputError(f"the concentration must be above 0 (is {self.concentration!r})")
        if not 0.0 <= self.tail <= 2.0:
            raise InputError(f"the tail must lie between 0 and 2 (is {self.tail!r})")

    @property
    def gamma(self) -> int:
        """Positions that a draft has."""
        return len(self.rank1)

    @property
    def chain_length(self) -> float:
        """tau of the chain: expected committed tokens a round, the bonus token included."""
        return 1.0 + float(np.cumprod(self.rank1).sum())

    def rank_table(self, width: int) -> NDArray[np.float64]:
        """[gamma, QUANTILES, width] probabilities of the ranks at each confidence."""
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

    def confidences(self) -> NDArray[np.float64]:
        """[gamma, QUANTILES] equally likely confidences of each depth; their mean is `rank1`."""
        known: dict[float, NDArray[np.float64]] = {}
        for rate in self.rank1:
            if rate not in known:
                known[rate] = _confidences(rate, self.concentration)
        return np.stack([known[rate] for rate in self.rank1])


def constant(
    chain_length: float,
    gamma: int = 15,
    *,
    label: str | None = None,
    concentration: float = CONCENTRATION,
    tail: float = TAIL,
) -> AcceptanceProcess:
    """The same acceptance at every depth, such that the chain commits `chain_length` a round.

    BlockPilot (eq. 24) describes block drafters so, by one rate; published tables give no
    more than one length a data set. Raises InputError for a length outside 1 .. gamma + 1.
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
    return AcceptanceProcess(
        label=label or f"chain of {chain_length:g} tokens",
        kind="given",
        rank1=(high,) * gamma,
        concentration=concentration,
        tail=tail,
    )


def recorded(
    accepted: Sequence[int],
    drafted: Sequence[int],
    *,
    label: str,
    gamma: int | None = None,
    concentration: float = CONCENTRATION,
    tail: float = TAIL,
) -> AcceptanceProcess:
    """The per-depth acceptance of a run of chains, as the statistics of a run record it.

    accepted, drafted  tokens of each round; rounds without a draft say nothing
    gamma              positions wanted; the deepest drafted chain where not given
    Depths that no round reached go on with the last rate that was seen. A rate is kept
    half an observation away from 0. Raises InputError where nothing was drafted.
    """
    got, tried = np.asarray(accepted), np.asarray(drafted)
    if got.shape != tried.shape or got.ndim != 1 or np.any(got > tried) or np.any(got < 0):
        raise InputError("each round needs the tokens it accepted and the as many or more drafted")
    deepest = int(tried.max(initial=0)) if gamma is None else gamma
    rates: list[float] = []
    for depth in range(1, deepest + 1):
        visits = int(np.sum((got >= depth - 1) & (tried >= depth)))
        hits = int(np.sum(got >= depth))
        if visits:
            rates.append(max(hits, 0.5) / visits if hits < visits else 1.0)
        elif rates:
            rates.append(rates[-1])
    if not rates:
        raise InputError("no round drafted anything: there is no acceptance to record")
    return AcceptanceProcess(
        label=label, kind="recorded", rank1=tuple(rates), concentration=concentration, tail=tail
    )


def _confidences(rate: float, concentration: float) -> NDArray[np.float64]:
    """Means of equally likely parts of LEAST + (1 - LEAST) x Beta, whose mean is `rate`."""
    from scipy.special import betainc, betaincinv  # slow to import, needed here only

    mean = (rate - LEAST_CONFIDENCE) / (1.0 - LEAST_CONFIDENCE)
    # So near the least confidence that what varies is lost in rounding, nothing does.
    if not 0.001 < mean < 1.0 or np.isinf(concentration):
        return np.full(QUANTILES, rate)
    a, b = mean * concentration, (1.0 - mean) * concentration
    at = np.linspace(0.0, 1.0, QUANTILES + 1)
    # The first moment of Beta(a, b) below x is mean x the distribution of Beta(a + 1, b); the
    # upper half is counted from 1 down, where most of the mass lies too close to 1 for x.
    below, above = betaincinv(a, b, at), betaincinv(b, a, 1.0 - at)
    parts = np.where(
        below[1:] <= 0.5,
        QUANTILES * mean * np.diff(betainc(a + 1.0, b, below)),
        1.0 + QUANTILES * (1.0 - mean) * np.diff(betainc(b + 1.0, a, above)),
    )
    confidences = LEAST_CONFIDENCE + (1.0 - LEAST_CONFIDENCE) * np.clip(parts, 0.0, 1.0)
    return np.asarray(confidences, dtype=np.float64)
