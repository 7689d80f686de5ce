"""The Domino draft model: a recurrent state over a path, and the correction that it gives.

Facts from public code (sgl-project/SpecForge, MIT; NVIDIA/Model-Optimizer, Apache-2.0): the state
takes in the target's embedding of every token of the path, the bonus token first. Behind it a
slot's logits are those of the block plus E2 silu(E1 [hidden ; state]).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from decoder.drafters.checkpoint import Fields
from decoder.drafters.dflash.config import INNER, DFlashConfig, backbone
from decoder.drafters.dflash.model import DFlashModel
from decoder.drafters.vocabulary import linear_of
from decoder.model.runtime.linear import join
from decoder.model.target import Target
from lab.drafters.conditional import Slots, Step

PROJECTORS = ("domino", "causal_v5")  # the second name is that of early checkpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class DominoConfig(DFlashConfig):
    """The fields of DFlash, and of the correction along a path.

    state        size of the recurrent state
    width        of the correction's inner layer
    plain_slots  first slots of the block, whose logits are not corrected
    """

    LABEL: ClassVar[str] = "a Domino drafter"

    vocab: int
    state: int
    width: int
    plain_slots: int

    @classmethod
    def recognises(cls, published: Mapping[str, Any]) -> bool:
        inner = published.get(INNER)
        fields = inner if isinstance(inner, Mapping) else published
        return fields.get("projector_type") in PROJECTORS

    @classmethod
    def read(cls, fields: Fields) -> dict[str, Any]:
        fields.get("projector_type")  # read, and unused
        values = backbone(fields, shifted=True)
        # Without the shift, public implementations differ in the state that a row takes.
        fields.require({"shift_label": True, "sample_from_anchor": True})
        width = fields.whole("emb_dim")
        own = {
            "vocab": fields.whole("vocab_size"),
            "state": fields.whole("gru_hidden_dim", width),
            "width": width,
            "plain_slots": fields.whole("pure_draft_prefix_len", 1, least=0),
        }
        return {"name": "domino", **values, **own}

    def costs(self) -> dict[str, object]:
        own = {name: getattr(self, name) for name in ("state", "width", "plain_slots")}
        return {**DFlashConfig.costs(self), **own}


class PrefixGru(nn.Module):
    """The weights of torch's `GRU(hidden, state, bias=False)`; gates: reset, update, new."""

    def __init__(self, hidden: int, state: int) -> None:
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * state, hidden))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * state, state))
        for weight in self.parameters():
            nn.init.uniform_(weight, -(state**-0.5), state**-0.5)


class DominoModel(DFlashModel):
    """The weights under their published names."""

    config_type = DominoConfig
    config: DominoConfig

    def __init__(self, config: DominoConfig, head: int | None = None) -> None:
        super().__init__(config, head)
        hidden = config.shape.hidden
        self.prefix_gru = PrefixGru(hidden, config.state)
        self.embed_proj = nn.Sequential(
            nn.Linear(hidden + config.state, config.width, bias=False),
            nn.SiLU(),
            nn.Linear(config.width, head or config.vocab, bias=False),
        )


class Correction:
    """The correction of slots along paths, with the part of the hidden states computed once."""

    def __init__(self, model: DominoModel, target: Target) -> None:
        self._model, self._target = model, target
        gru, (first, _, last) = model.prefix_gru, model.embed_proj
        hidden = model.config.shape.hidden
        self._of_inputs = join([linear_of(gru.weight_ih_l0)])
        self._of_hidden = join([linear_of(first.weight[:, :hidden])])
        # A state enters the gates of the next token and the correction in its own slot.
        parts = gru.weight_hh_l0, first.weight[:, hidden:]
        self._of_states = join([linear_of(torch.cat(parts))])
        self._sizes = len(gru.weight_hh_l0), model.config.width
        self._outputs = last.weight  # [head, width]

    def start(self) -> torch.Tensor:
        """The state of the empty path, with its part of the gates: [1, 4 * state]."""
        return self._outputs.new_zeros(1, 4 * self._model.config.state)

    def step(self, hidden: torch.Tensor, slots: Slots | None) -> Step:
        """The step of `grow_levels` over slots, of hidden states [rows, hidden].

        Without slots it corrects the whole head.
        """
        config, of_hidden = self._model.config, self._of_hidden(hidden)
        plain, size = config.plain_slots, config.state
        outputs = None if slots is None else self._outputs[slots.places].float()

        def step(
            row: int, states: torch.Tensor, tokens: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            # A GRU's next states [F, state], of one more input each.
            before, gates, new_gate = states.split((size, 2 * size, size), dim=-1)
            embedded = self._target.embed(tokens)
            inputs, new_input = self._of_inputs(embedded).split((2 * size, size), dim=-1)
            reset, update = torch.sigmoid(inputs + gates).chunk(2, dim=-1)
            new = torch.tanh(new_input + reset * new_gate)
            states = torch.lerp(new, before, update)
            gates, of_state = self._of_states(states).split(self._sizes, dim=-1)
            after = torch.cat((states, gates), dim=-1)
            inner = functional.silu(of_hidden[row] + of_state)
            if row < plain:
                inner = torch.zeros_like(inner)
            if outputs is None:
                return after, functional.linear(inner, self._outputs).float()
            return after, inner.float() @ outputs[row].T

        return step
