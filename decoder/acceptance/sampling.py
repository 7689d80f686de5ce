"""The distributions that tokens are sampled from: temperature, top-k and top-p."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch

from costmodel.errors import InputError, shown

# Logits reach some thousands, and float32 ends at 3e38; below COLDEST a divisor becomes 0.
COLD, COLDEST = 1e-30, 1e-37


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Options of the target's token choice.

    temperature  0 takes the argmax; otherwise logits are divided by it
    top_p        keep the smallest set of tokens whose probability reaches it (1: all)
    top_k        keep the k most probable tokens (0: all)
    seed         of the generator. Walked trees make one draw for each emitted token, in
                 order, so a seed gives the same text under every policy. With sampled trees
                 the distribution of texts is the same, but a seed's text also depends on the
                 shapes of all trees, and so on the policy and on measured times
    Raises InputError for values out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            object.__setattr__(self, name, _number(name, getattr(self, name)))
        for name in ("top_k", "seed"):  # torch takes no integers of other libraries
            object.__setattr__(self, name, _whole(name, getattr(self, name)))
        if not 0.0 <= self.temperature < float("inf"):
            raise InputError(f"temperature must be 0 or more, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise InputError(f"top-p must lie in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise InputError(f"top-k must be 0 (all tokens) or more, got {shown(self.top_k)}")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"seed must lie between 0 and 2^63 - 1, got {shown(self.seed)}")


def _number(name: str, value: Any) -> float:
    """The value as a float. Raises InputError."""
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):
            return float(value)
    raise InputError(f"{name} must be a number, got {shown(value)}")


def _whole(name: str, value: Any) -> int:
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    raise InputError(f"{name} must be a whole number, got {shown(value)}")


class RunningEntropy:
    """Mean entropy, in nats, of the target's recent distributions; fades by `FADING` each."""

    FADING = 0.98

    def __init__(self) -> None:
        self._new: list[torch.Tensor] = []
        self._sum = 0.0
        self._weight = 0.0

    def add(self, probabilities: torch.Tensor) -> None:
        """Add one distribution [vocab], without a copy to the host."""
        self._new.append(entropy_of(probabilities))

    def note(self, entropy: float) -> None:
        """Add the entropy of one distribution, in nats, that is on the host."""
        self._take_new()
        self._count(entropy)

    def mean(self) -> float | None:
        """The mean so far; None before the first distribution."""
        self._take_new()
        return self._sum / self._weight if self._weight else None

    def _take_new(self) -> None:
        if self._new:
            for entropy in torch.stack(self._new).tolist():
                self._count(entropy)
            self._new.clear()

    def _count(self, entropy: float) -> None:
        self._sum = self.FADING * self._sum + entropy
        self._weight = self.FADING * self._weight + 1.0


def entropy_of(probabilities: torch.Tensor) -> torch.Tensor:
    return torch.special.entr(probabilities).sum()


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
        scaled = scaled.masked_fill(
            _beyond_top_p(scaled.softmax(-1), sampling.top_p), float("-inf")
        )
    return scaled.softmax(-1)


def cooled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Float32 logits over the temperature, so that the softmax is the target's at it.

    The quotient overflows at temperatures where the softmax is one token already. There the
    largest logit is taken off first, which leaves the softmax as it is.
    """
    if temperature >= COLD:
        return logits / temperature
    return (logits - logits.amax(-1, keepdim=True)) / max(temperature, COLDEST)


def _beyond_top_p(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """The tokens that top-p drops, boolean [vocab]: the least probable, 1 - top_p at most in sum.

    Sorting a whole vocabulary costs a fifth of a forward on a CPU. Tokens below
    (1 - top_p) / vocab sum to less than 1 - top_p, so all of them are dropped and only the
    others are sorted. An accelerator sorts all, since it would have to wait for their number.
    """
    cut = 1.0 - top_p
    if probabilities.device.type != "cpu":
        return _beyond_in_order(probabilities, cut)
    likely = probabilities >= cut / len(probabilities)
    ordered, order = torch.sort(probabilities[likely])
    if not len(ordered):  # probabilities that are not numbers; the caller sees it
        return likely
    dropped = ordered.cumsum(0) + probabilities[~likely].sum() <= cut
    dropped[-1] = False
    beyond = ~likely
    beyond[likely] = torch.zeros_like(dropped).scatter(0, order, dropped)
    return beyond


def _beyond_in_order(probabilities: torch.Tensor, cut: float) -> torch.Tensor:
    """The least probable tokens, `cut` at most in sum, never the most probable; sorts all."""
    ordered, order = torch.sort(probabilities)
    dropped = ordered.cumsum(0) <= cut
    dropped[-1] = False
    return torch.zeros_like(dropped).scatter(0, order, dropped)
