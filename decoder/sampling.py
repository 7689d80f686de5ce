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
    seed         of the generator; the same seed gives the same text under every policy,
                 because one draw is made for each emitted token, in order
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
    """Draws the target's own token at one row, with its own random generator."""

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self.sampling = sampling
        self._generator = torch.Generator(device=device)
        self._generator.manual_seed(sampling.seed)

    def __call__(self, logits: torch.Tensor) -> int:
        """One token from logits [vocab]; only the rows the walk visits come here."""
        if self.sampling.temperature == 0.0:
            return int(logits.argmax())
        probabilities = target_distribution(logits, self.sampling)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))


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
        ordered, order = torch.sort(scaled, descending=False)
        dropped = ordered.softmax(-1).cumsum(-1) <= 1.0 - sampling.top_p
        dropped[-1] = False
        scaled = scaled.masked_fill(dropped.scatter(0, order, dropped), float("-inf"))
    return scaled.softmax(-1)
