"""The weights of a DSpark drafter: DFlash's, and its heads (Cheng et al., 2026).

U_k are the logits of row k, h_k its hidden state, a the token before. The corrected logits are

    vanilla  U_k + W2 W1[a]
    gated    U_k + W2 (g W1[a]),  g = sigmoid(G [h_k; W1[a]])
    rnn      U_k + W2 tanh(o),    [g; c; o] = J [s; W1[a]; h_k], s = 0 before the bonus token,
             and then s becomes sigmoid(g) s + (1 - sigmoid(g)) tanh(c)

DeepSpec (deepseek-ai/DeepSpec, MIT) copies the target's config and adds fields at the top level;
SpecForge and ModelOpt put them in `dflash_config`; speculators has the layers' in
`transformer_layer_config`. Both also write plain DFlash drafters in their form, without a rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.nn import functional

from decoder.drafters.checkpoint import Fields, architectures
from decoder.drafters.dflash.config import INNER, DFlashConfig, backbone, of_speculators
from decoder.drafters.dflash.model import DFlashModel
from lab.drafters.conditional import LEVEL_NODES

Correction = Literal["none", "vanilla", "gated", "rnn"]
CORRECTIONS: tuple[Correction, ...] = ("vanilla", "gated", "rnn")
PAIRED = 32  # candidates of a position, among which all pairs are scored
SPECULATORS = ("dspark", "dflash")  # kinds of the speculators library
OWN_ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator", "DFlashSpeculator")


@dataclass(frozen=True, slots=True, kw_only=True)
class DSparkConfig(DFlashConfig):
    """The fields of a DFlash drafter's config, and those of the heads.

    correction   how a row's scores depend on the tokens before it
    rank         of the correction; 0 without one
    confidence   the width of the confidence head's input; 0 without this head
    """

    LABEL: ClassVar[str] = "a DSpark drafter"
    ARCHITECTURES: ClassVar[tuple[str, ...]] = (*OWN_ARCHITECTURES, "DFlashDraftModel")

    correction: Correction
    rank: int
    confidence: int

    @classmethod
    def recognises(cls, published: Mapping[str, Any]) -> bool:
        inner = published.get(INNER)
        named = any(name in architectures(published) for name in OWN_ARCHITECTURES)
        kind = inner.get("projector_type") if isinstance(inner, Mapping) else None
        return named or kind == "dspark" or published.get("speculators_model_type") in SPECULATORS

    @classmethod
    def read(cls, fields: Fields) -> dict[str, Any]:
        fields.get("projector_type")  # read, and unused
        values = backbone(fields, shifted=not of_speculators(fields))
        values["vocab"] = fields.whole("vocab_size")
        rank = fields.whole("markov_rank", 0, least=0)
        correction = fields.get("markov_head_type") or "vanilla"
        if correction not in CORRECTIONS:
            raise fields.wrong("markov_head_type", f"one of {', '.join(CORRECTIONS)}")
        confident = fields.one_flag(("enable_confidence_head", "use_confidence_head"), False)
        with_rank = fields.flag("confidence_head_with_markov", True)
        width = values["shape"].hidden + (rank if with_rank else 0)
        return values | {
            "name": "dspark" if rank else "dflash",
            "correction": correction if rank else "none",
            "rank": rank,
            "confidence": width if confident else 0,
        }

    def costs(self) -> dict[str, object]:
        # Not by super(): a dataclass with slots is another class than the one that was written.
        costs = DFlashConfig.costs(self)
        if self.correction == "none":
            return costs
        width = LEVEL_NODES if self.correction == "rnn" else PAIRED
        return costs | {"correction": self.correction, "rank": self.rank, "candidates": width}


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
