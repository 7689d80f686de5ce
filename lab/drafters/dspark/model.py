"""The weights of a DSpark drafter: DFlash's, and its heads (Cheng et al., 2026).

U_k are the logits of row k, h_k its hidden state, a the token before. The corrected logits are

    vanilla  U_k + W2 W1[a]
    gated    U_k + W2 (g W1[a]),  g = sigmoid(G [h_k; W1[a]])
    rnn      U_k + W2 tanh(o),    [g; c; o] = J [s; W1[a]; h_k], s = 0 before the bonus token,
             and then s becomes sigmoid(g) s + (1 - sigmoid(g)) tanh(c)
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from decoder.drafters.dflash.model import DFlashModel
from lab.drafters.dspark.config import DSparkConfig


class MarkovHead(nn.Module):
    """The correction of a row's logits by the tokens before it."""

    def __init__(self, config: DSparkConfig, size: int) -> None:
        """size: the number of tokens that are drafted"""
        super().__init__()
        rank, hidden = config.rank, config.shape.hidden
        self.markov_w1 = nn.Embedding(config.vocab or size, rank)
        self.markov_w2 = nn.Linear(rank, size, bias=False)
        self._gated, self._rank = config.correction == "gated", rank
        if self._gated:
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif config.correction == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def vectors(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """What W2 multiplies, [rows, K, r], of hidden states [rows, H] behind tokens [rows, K]."""
        before = self.markov_w1(tokens)
        if not self._gated:
            return before
        width, gate = hidden.shape[-1], self.gate_proj
        of_rows = functional.linear(hidden, gate.weight[:, :width], gate.bias)[:, None]
        return before * (of_rows + functional.linear(before, gate.weight[:, width:])).sigmoid()

    def parts(self, hidden: torch.Tensor) -> torch.Tensor:
        """The part [rows, 3 * r] of J's product that hidden states [rows, H] give."""
        joint = self.joint_proj
        return functional.linear(hidden, joint.weight[:, 2 * self._rank :], joint.bias).float()

    def path_weight(self) -> torch.Tensor:
        """J's part for states and tokens, in float32: so small products are the faster in it."""
        return self.joint_proj.weight[:, : 2 * self._rank].float()

    def step(
        self, part: torch.Tensor, weight: torch.Tensor, states: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """States [F, r] behind tokens [F], and what W2 multiplies [F, r], in a row of this part.

        weight  `path_weight()`
        """
        paths = torch.cat((states, self.markov_w1(tokens).float()), dim=-1)
        mixed = part + functional.linear(paths, weight)
        gate, content, output = mixed.chunk(3, dim=-1)
        return torch.lerp(content.tanh(), states, gate.sigmoid()), output.tanh()


class DSparkModel(DFlashModel):
    """The weights under DeepSpec's names; ModelOpt's have no `markov_head.` before them."""

    config_type: ClassVar[type[DSparkConfig]] = DSparkConfig
    config: DSparkConfig

    def __init__(self, config: DSparkConfig, head: int | None = None) -> None:
        super().__init__(config, head)
        size = head or config.draft_vocab or config.vocab
        if config.rank and size:
            self.markov_head = MarkovHead(config, size)
        if config.confidence:
            # sigmoid(proj [h_k; W1[a]]): the rate at which a row's drafted token is accepted. It is
            # kept with the other weights; no tree is built by it.
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(config.confidence, 1)})

    @classmethod
    def stored_names(cls, names: Iterable[str], stored: Set[str]) -> dict[str, str]:
        if any(name.startswith("markov_head.") for name in stored):
            return {name: name for name in names}
        bare = ((name, name.removeprefix("markov_head.")) for name in names)
        return {name: new.replace("confidence_head.proj", "confidence_proj") for name, new in bare}
