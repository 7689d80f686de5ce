"""The draws of sampled tokens, and their distributions: temperature, top-k and top-p."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf, isfinite
from numbers import Integral, Real
from typing import Any

import torch

from costmodel.errors import InputError, shown
from costmodel.online import FadingMean
from costmodel.statistics import Array, Ints
from decoder.device import to_device
from decoder.model.runtime.eager import NO_TOKEN

# Logits reach some thousands, and float32 ends at 3e38; below COLDEST a divisor becomes 0.
COLD, COLDEST = 1e-30, 1e-37
CANDIDATES = 1024  # of a row that top-k and top-p leave more tokens is drawn by itself
ROWS_AT_ONCE = 64  # whose distributions over 150,000 tokens take 40 MB each
BY_ITSELF = NO_TOKEN - 1


RANGES: tuple[tuple[str, type, Callable[[Any], bool], str], ...] = (
    ("temperature", Real, lambda value: 0.0 <= value < inf, "temperature must be 0 or more"),
    ("top_p", Real, lambda value: 0.0 < value <= 1.0, "top-p must lie in (0, 1]"),
    ("top_k", Integral, lambda value: value >= 0, "top-k must be 0 (all tokens) or more"),
    ("seed", Integral, lambda value: 0 <= value < 2**63, "seed must lie between 0 and 2^63 - 1"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Options of the target's token choice.

    temperature  0 takes the argmax; otherwise logits are divided by it
    top_p        keep the smallest set of tokens whose probability reaches it (1: all)
    top_k        keep the k most probable tokens (0: all)
    seed         of the generator. With walked trees a seed gives the same text under every
                 policy. With sampled trees a seed's text also depends on the shapes of all
                 trees, and so on the policy and on measured times
    Raises InputError for values out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, kind, fits, rule in RANGES:  # torch takes no integers of other libraries
            made: type[Any] = float if kind is Real else int
            noun = "number" if made is float else "whole number"
            value, exact = getattr(self, name), None
            if isinstance(value, kind) and not isinstance(value, bool):
                with suppress(OverflowError):
                    exact = made(value)
            if exact is None:
                raise InputError(f"{name} must be a {noun}, got {shown(value)}")
            if not fits(exact):
                raise InputError(f"{rule}, got {shown(exact)}")
            object.__setattr__(self, name, exact)


def target_distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The distribution after temperature, top-k and top-p, float32 [vocab].

    Order and edge cases are those of transformers' warpers: top-k keeps ties with the k-th
    logit, and top-p always keeps the most probable token.
    """
    scaled = cooled(logits.float(), sampling.temperature)
    if 0 < sampling.top_k < scaled.shape[-1]:
        smallest = torch.topk(scaled, sampling.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < smallest, float("-inf"))
    if sampling.top_p < 1.0:
        beyond = _beyond_top_p(scaled.softmax(-1), sampling.top_p)
        scaled = scaled.masked_fill(beyond, float("-inf"))
    return scaled.softmax(-1)


def cooled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Float32 logits over the temperature, less the largest first where that would overflow."""
    if temperature >= COLD:
        return logits / temperature
    return (logits - logits.amax(-1, keepdim=True)) / max(temperature, COLDEST)


def _beyond_top_p(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """The tokens that top-p drops, boolean [vocab]: the least probable, 1 - top_p at most in sum.

    Sorting a whole vocabulary costs a fifth of a forward on a CPU. Tokens below
    (1 - top_p) / vocab sum to less than 1 - top_p, so only the others are sorted. An accelerator
    waits for their number: `draw_rows` does without.
    """
    cut = 1.0 - top_p
    likely = probabilities >= cut / len(probabilities)
    ordered, order = torch.sort(probabilities[likely])
    if not len(ordered):  # probabilities that are not numbers; the caller sees it
        return likely
    dropped = ordered.cumsum(0) + probabilities[~likely].sum() <= cut
    dropped[-1] = False
    beyond = ~likely
    beyond[likely] = torch.zeros_like(dropped).scatter(0, order, dropped)
    return beyond


class SeededChoices:
    """The random choices of one text, with a generator of its own.

    A token is the argmax of p / noise with exponential noise, as in torch.multinomial. The i-th
    visited row takes the i-th noise, so the draws of all rows of a tree can be made before the
    visited ones are known, and both ways give the same text.

    entropy  collects the entropy of the distributions of visited rows; None: not needed
    """

    def __init__(
        self, sampling: Sampling, device: torch.device, entropy: FadingMean | None = None
    ) -> None:
        self._sampling, self._entropy = sampling, entropy
        self.generator = torch.Generator(device).manual_seed(sampling.seed)
        # `happens` draws on the host, since each answer of a device would be waited for.
        self._coins = self.generator
        if device.type != "cpu":
            self._coins = torch.Generator().manual_seed(sampling.seed)
        self._noise: torch.Tensor | None = None  # made and not yet taken [draws, vocab]

    def __call__(self, logits: torch.Tensor) -> int:
        """The target's token at T > 0 of a visited row [vocab]; `NO_TOKEN` for logits of NaN."""
        probabilities = target_distribution(logits, self._sampling)
        noise = self._noises(1, probabilities)[0]
        values = [(probabilities / noise).argmax().double(), probabilities.sum().double()]
        if self._entropy is not None:
            values.append(torch.special.entr(probabilities).sum().double())
        token, total, *entropy = torch.stack(values).tolist()
        return self._take(int(token) if isfinite(total) else NO_TOKEN, *entropy)

    def distribution(self, logits: torch.Tensor) -> torch.Tensor:
        """The target's distribution at T > 0, float32 [vocab], of logits [vocab]."""
        probabilities = target_distribution(logits, self._sampling)
        if self._entropy is not None:
            self._entropy.add(float(torch.special.entr(probabilities).sum()))
        return probabilities

    def happens(self, probability: float) -> bool:
        """True with this probability: always at 1, never at 0."""
        return float(torch.rand(1, generator=self._coins, dtype=torch.float64)) < probability

    def one_of(self, weights: torch.Tensor) -> int:
        """An index drawn in proportion to weights [vocab]; `NO_TOKEN` if they are not numbers."""
        return int(one_of_each(weights[None], self.uniform()))

    def uniform(self) -> torch.Tensor:
        """A number [1] in [0, 1), float64, on the generator's device."""
        where = self.generator.device
        return torch.rand(1, dtype=torch.float64, generator=self.generator, device=where)

    def of_tree(self, depths: Ints, logits: torch.Tensor) -> torch.Tensor:
        """Tokens and entropies, float64 [2, rows], of rows at depths [rows] below the root."""
        noise = self._noises(int(depths.max()) + 1, logits)
        place, parts = to_device(depths, logits.device), []
        for rows, at in zip(logits.split(ROWS_AT_ONCE), place.split(ROWS_AT_ONCE), strict=True):
            parts.append(draw_rows(rows, noise, at, self._sampling))
        return torch.cat(parts, 1)

    def visit(self, drawn: Array, row: int, logits: torch.Tensor) -> int:
        """The token of a visited row, whose host has `of_tree` or greedy tokens and zeros."""
        token, entropy = int(drawn[0, row]), float(drawn[1, row])
        return self(logits[row]) if token == BY_ITSELF else self._take(token, entropy)

    def _noises(self, count: int, like: torch.Tensor) -> torch.Tensor:
        """The next noises [count, vocab], each made by a call of its own."""
        left = 0 if self._noise is None else len(self._noise)
        new = torch.empty(max(count - left, 0), like.shape[-1], device=like.device)
        for noise in new:
            noise.exponential_(1.0, generator=self.generator)
        self._noise = new if self._noise is None else torch.cat((self._noise, new))
        return self._noise[:count]

    def _take(self, token: int, entropy: float = 0.0) -> int:
        if self._noise is not None:
            self._noise = self._noise[1:]
        if self._entropy is not None and token != NO_TOKEN:
            self._entropy.add(entropy)
        return token


def draw_rows(
    logits: torch.Tensor, noise: torch.Tensor, place: torch.Tensor, sampling: Sampling
) -> torch.Tensor:
    """Tokens and entropies float64 [2, rows] of logits [rows, vocab], without a sort of all.

    A row of which top-k and top-p may keep more than `kept_shares` has is `BY_ITSELF`.

    noise  [draws, vocab];  place  [rows] the noise of each row
    """
    shares, order, more = kept_shares(cooled(logits.float(), sampling.temperature), sampling)
    best = (shares / (noise[place] if order is None else noise[place[:, None], order])).argmax(-1)
    tokens = best if order is None else order.gather(1, best[:, None])[:, 0]
    tokens = torch.where(shares.sum(-1).isfinite(), tokens, NO_TOKEN)
    if more is not None:
        tokens = torch.where(more, BY_ITSELF, tokens)
    return torch.stack((tokens.double(), torch.special.entr(shares).sum(-1).double()))


def kept_shares(
    scaled: torch.Tensor, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Shares [rows, width] of the most probable tokens of cooled logits, 0 where a row drops them.

    And these tokens [rows, width] (None: all, in order), and whether a row may keep more than
    these, boolean [rows] (None: no row does).
    """
    vocab, top_k, top_p, more = scaled.shape[-1], sampling.top_k, sampling.top_p, None
    cut = 0 < top_k < vocab
    if top_p == 1.0 and not cut:
        return scaled.softmax(-1), None, None
    width = min(vocab, max(CANDIDATES, top_k + 1))
    scores, order = torch.topk(scaled, width)  # in falling order
    kept = torch.ones_like(scores, dtype=torch.bool)
    whole = scaled.logsumexp(-1, keepdim=True)
    if cut:
        kept = scores >= scores[:, top_k - 1, None]
        whole = torch.where(kept, scores, -torch.inf).logsumexp(-1, keepdim=True)
    shares = (scores - whole).exp() * kept
    before = shares.cumsum(-1) - shares
    if width < vocab:
        more = kept[:, -1] if cut else before[:, -1] + shares[:, -1] < top_p
    kept = kept & (before < top_p)
    kept[:, 0] = True
    shares = shares * kept
    return shares / shares.sum(-1, keepdim=True), order, more


def row_distributions(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """`target_distribution` of each row [rows, vocab]; NaN where it may keep more tokens."""
    scaled = cooled(logits.float(), sampling.temperature)
    shares, order, more = kept_shares(scaled, sampling)
    if order is not None:
        shares = torch.zeros_like(scaled).scatter_(1, order, shares)
    return shares if more is None else torch.where(more[:, None], torch.nan, shares)


def one_of_each(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The index at a share [1] of each row's weights [rows, vocab]; `NO_TOKEN` for NaN."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # uniform < 1, so the place lies below the total, and only weights above 0 can be hit.
    index = torch.searchsorted(cumulative, uniform.to(weights.device) * total, right=True)
    sound = (index < weights.shape[-1]) & total.isfinite()
    return torch.where(sound, index, NO_TOKEN)[:, 0].double()
