"""From a row of logits to one token: argmax, or temperature, top-k and top-p."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from costmodel.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the target picks a token from its own distribution.

    temperature  0 takes the argmax; otherwise logits are divided by it
    top_p        keep the smallest set of tokens whose probability reaches it (1: all)
    top_k        keep the k most probable tokens (0: all)
    seed         of the generator. Trees that are walked leave the text alone: one draw is
                 made for each emitted token, in order, so the same seed gives the same text
                 under every policy. Sampled trees give the same distribution
                 of texts, but a seed's text then depends on the trees too: it comes again
                 with the same shapes in every round, not under another policy, and not where
                 measured times choose the tree sizes
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise InputError(f"temperature must be 0 or more, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise InputError(f"top-p must lie in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise InputError(f"top-k must be 0 (all tokens) or more, got {self.top_k}")


class Picker:
    """All random choices of one sequence, with its own generator.

    entropy  where one is given, the entropy of every distribution used is noted there
    """

    def __init__(
        self, sampling: Sampling, device: torch.device, entropy: RunningEntropy | None = None
    ) -> None:
        self.sampling = sampling
        self.generator = torch.Generator(device=device)
        self.generator.manual_seed(sampling.seed)
        self._entropy = entropy

    def __call__(self, logits: torch.Tensor) -> int:
        """The target's own token from logits [vocab]; only visited rows come here."""
        if self.sampling.temperature == 0.0:
            return int(logits.argmax())
        probabilities = self.distribution(logits)
        return int(torch.multinomial(probabilities, 1, generator=self.generator))

    def distribution(self, logits: torch.Tensor) -> torch.Tensor:
        """What the target samples from at T > 0, float32 [vocab], of logits [vocab]."""
        probabilities = target_distribution(logits, self.sampling)
        if self._entropy is not None:
            self._entropy.add(probabilities)
        return probabilities

    def happens(self, probability: float) -> bool:
        """True with this probability: always at 1, never at 0."""
        uniform = torch.rand(
            1, generator=self.generator, device=self.generator.device, dtype=torch.float64
        )
        return float(uniform) < probability

    def one_of(self, weights: torch.Tensor) -> int:
        """An index drawn in proportion to weights [vocab], float64, not negative."""
        cumulative = weights.cumsum(0, dtype=torch.float64)
        uniform = torch.rand(
            1, generator=self.generator, device=self.generator.device, dtype=torch.float64
        )
        # uniform < 1, so the place lies below the total, and only weights above 0 can be hit.
        place = uniform.to(weights.device) * cumulative[-1]
        index = int(torch.searchsorted(cumulative, place, right=True))
        if index == len(weights):
            raise InputError("the target's probabilities are not numbers (NaN or infinite logits)")
        return index


class RunningEntropy:
    """Mean entropy, in nats, of the target's recent distributions; fades by `FADING` each."""

    FADING = 0.98

    def __init__(self) -> None:
        self._new: list[torch.Tensor] = []
        self._sum = 0.0
        self._weight = 0.0

    def add(self, probabilities: torch.Tensor) -> None:
        """Note one distribution, [vocab]; nothing is copied to the host yet."""
        self._new.append(torch.special.entr(probabilities).sum())

    def mean(self) -> float | None:
        """The mean so far; None before the first distribution."""
        if self._new:
            for entropy in torch.stack(self._new).tolist():
                self._sum = self.FADING * self._sum + entropy
                self._weight = self.FADING * self._weight + 1.0
            self._new.clear()
        return self._sum / self._weight if self._weight else None


def target_distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The distribution that is sampled from, float32 [vocab]: temperature, top-k, top-p.

    Same order and same edge rules as transformers' warpers, so that both sample
    from one distribution: top-k keeps ties with the k-th logit, top-p always
    keeps the most probable token.
    """
    scaled = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scaled.shape[-1]:
        smallest = torch.topk(scaled, sampling.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < smallest, float("-inf"))
    if sampling.top_p < 1.0:
        scaled = scaled.masked_fill(
            _beyond_top_p(scaled.softmax(-1), sampling.top_p), float("-inf")
        )
    return scaled.softmax(-1)


def _beyond_top_p(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """The tokens that top-p leaves out, boolean [vocab]: the least ones, up to 1 - top_p in all.

    Sorting a whole vocabulary costs a fifth of a forward on a CPU. Tokens of less than
    (1 - top_p) / vocab weigh less than 1 - top_p together, so all of them are left out and
    only the others need an order.
    """
    cut = 1.0 - top_p
    likely = probabilities >= cut / len(probabilities)
    ordered, order = torch.sort(probabilities[likely])
    dropped = ordered.cumsum(0) + probabilities[~likely].sum() <= cut
    dropped[-1] = False
    beyond = ~likely
    beyond[likely] = torch.zeros_like(dropped).scatter(0, order, dropped)
    return beyond
