"""From a row of logits to one token: argmax, or temperature, top-k and top-p."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import torch

from costmodel.errors import InputError

NO_NUMBERS = "the target's probabilities are not numbers (NaN or infinite logits)"


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
        # Yes or no is decided on the host: from a device every answer would be waited for.
        self._coins = self.generator
        if device.type != "cpu":
            self._coins = torch.Generator().manual_seed(sampling.seed)
        self._entropy = entropy

    def __call__(self, logits: torch.Tensor) -> int:
        """The target's own token from logits [vocab]; only visited rows come here.

        One copy to the host. At T > 0 the draw is the argmax of p / noise, the noise
        exponential, as in torch.multinomial, which would ask the device twice more.
        """
        if self.sampling.temperature == 0.0:
            # Half as long on a CPU, which has no vector code for the argmax of bfloat16.
            return int(logits.float().argmax())
        probabilities = target_distribution(logits, self.sampling)
        noise = torch.empty_like(probabilities).exponential_(1.0, generator=self.generator)
        token = (probabilities / noise).argmax()
        wanted = [token.double(), probabilities.sum().double()]
        if self._entropy is not None:
            wanted.append(_entropy(probabilities).double())
        index, total, *entropy = torch.stack(wanted).tolist()
        if not isfinite(total):
            raise InputError(NO_NUMBERS)
        if self._entropy is not None:
            self._entropy.note(*entropy)
        return int(index)

    def distribution(self, logits: torch.Tensor) -> torch.Tensor:
        """What the target samples from at T > 0, float32 [vocab], of logits [vocab]."""
        probabilities = target_distribution(logits, self.sampling)
        if self._entropy is not None:
            self._entropy.add(probabilities)
        return probabilities

    def happens(self, probability: float) -> bool:
        """True with this probability: always at 1, never at 0."""
        return float(torch.rand(1, generator=self._coins, dtype=torch.float64)) < probability

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
            raise InputError(NO_NUMBERS)
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
        self._new.append(_entropy(probabilities))

    def note(self, entropy: float) -> None:
        """Note the entropy of one distribution, in nats, that is on the host already."""
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


def _entropy(probabilities: torch.Tensor) -> torch.Tensor:
    return torch.special.entr(probabilities).sum()


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
    only the others need an order. How many those are an accelerator would have to be asked
    for, so there all are sorted.
    """
    cut = 1.0 - top_p
    if probabilities.device.type != "cpu":
        return _beyond_in_order(probabilities, cut)
    likely = probabilities >= cut / len(probabilities)
    ordered, order = torch.sort(probabilities[likely])
    dropped = ordered.cumsum(0) + probabilities[~likely].sum() <= cut
    dropped[-1] = False
    beyond = ~likely
    beyond[likely] = torch.zeros_like(dropped).scatter(0, order, dropped)
    return beyond


def _beyond_in_order(probabilities: torch.Tensor, cut: float) -> torch.Tensor:
    """The least tokens, up to `cut` in all but never the most probable one, by sorting them all."""
    ordered, order = torch.sort(probabilities)
    dropped = ordered.cumsum(0) <= cut
    dropped[-1] = False
    return torch.zeros_like(dropped).scatter(0, order, dropped)
