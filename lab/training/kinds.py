"""The kinds of block drafters that one recipe trains: what each adds to DFlash's backbone.

Where a kind's scores depend on the tokens before, training gives it those of the text (teacher
forcing); in decoding they are the candidates that it drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from decoder.drafters.dflash.drafter import DFlashDrafter
from lab.drafters.dflash2.drafter import DFlash2Drafter
from lab.drafters.dflash2.model import DFlash2Model
from lab.drafters.domino.drafter import DominoDrafter
from lab.drafters.domino.model import DominoModel
from lab.drafters.dspark.drafter import DSparkDrafter
from lab.drafters.dspark.model import DSparkModel

# From hidden states [anchors, depth, hidden], the tokens before each of these positions and their
# embeddings, to what is added to the head's logits.
Added = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKind:
    """One kind.

    fields  of its config's `dflash_config`, from the rank of its tables, the size of its state and
            whether its rows are shifted, where it has these
    begin   sets first weights, with which it drafts as DFlash does, from the target's embedding
    added   None where the scores depend on no token of the block
    """

    drafter: type[DFlashDrafter] = DFlashDrafter
    fields: Callable[[int, int, bool], Mapping[str, Any]] = lambda rank, state, shifted: {}
    begin: Callable[[Any, Tensor], None] = lambda model, embedding: None
    added: Added | None = None


def projected(embedding: Tensor, rank: int) -> Tensor:
    """The embedding [vocab, hidden] in `rank` random directions, of unit size.

    Tokens that the texts lack then begin near those that are used alike.
    """
    rows = embedding.detach().float()
    table = (rows - rows.mean(0)) @ torch.randn(rows.shape[1], rank).to(rows.device)
    return table / table.std()


def begin_dspark(model: DSparkModel, embedding: Tensor) -> None:
    head = model.markov_head
    head.markov_w1.weight.copy_(projected(embedding, head.markov_w1.weight.shape[1]))
    nn.init.zeros_(head.markov_w2.weight)


def dspark_added(model: DSparkModel, hidden: Tensor, previous: Tensor, _: Tensor) -> Tensor:
    head = model.markov_head
    return head.markov_w2(head.markov_w1(previous))


def begin_dflash2(model: DFlash2Model, embedding: Tensor) -> None:
    selector = model.candidate_selector
    selector.predecessor_codebook.copy_(projected(embedding, model.config.rank))
    nn.init.zeros_(selector.successor_codebook)


def dflash2_added(model: DFlash2Model, hidden: Tensor, previous: Tensor, _: Tensor) -> Tensor:
    selector = model.candidate_selector
    contexts = selector.predecessor_codebook[previous] * selector.hidden_projection(hidden)
    return functional.linear(contexts, selector.successor_codebook)


def begin_domino(model: DominoModel, embedding: Tensor) -> None:
    nn.init.zeros_(model.embed_proj[-1].weight)


def domino_added(model: DominoModel, hidden: Tensor, _: Tensor, embedded: Tensor) -> Tensor:
    gru, plain = model.prefix_gru, model.config.plain_slots
    weights = [gru.weight_ih_l0, gru.weight_hh_l0]
    first = embedded.new_zeros(1, len(embedded), model.config.state)
    with torch.autocast(embedded.device.type, enabled=False):
        states, _ = torch.gru(embedded, first, weights, False, 1, 0.0, True, False, True)
    added = model.embed_proj(torch.cat((hidden, states), dim=-1))
    return functional.pad(added[:, plain:], (0, 0, plain, 0))


KINDS = {
    "dflash": BlockKind(),
    "jetspec": BlockKind(fields=lambda rank, state, shifted: {"causal_head": True}),
    "dspark": BlockKind(
        drafter=DSparkDrafter,
        fields=lambda rank, state, shifted: {
            "projector_type": "dspark", "shift_label": shifted, "markov_rank": rank,
            "markov_head_type": "vanilla",
        },
        begin=begin_dspark,
        added=dspark_added,
    ),
    "dflash2": BlockKind(
        drafter=DFlash2Drafter,
        fields=lambda rank, state, shifted: {
            "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": rank,
            "selector_top_k": 16,
        },
        begin=begin_dflash2,
        added=dflash2_added,
    ),
    "domino": BlockKind(
        drafter=DominoDrafter,
        fields=lambda rank, state, shifted: {
            "projector_type": "domino", "shift_label": True, "pure_draft_prefix_len": 1,
            "gru_hidden_dim": state, "emb_dim": rank,
        },
        begin=begin_domino,
        added=domino_added,
    ),
}  # fmt: skip
