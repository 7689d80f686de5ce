"""What an update of a SpecBlock drafter is while it serves (Shi et al., 3.4).

Where the paper is silent or leaves a choice, this is what is done here:

- `heads` are the language-model head and the rank head; the final norm before them belongs to
  the trunk.
- The distributions are over the drafter's tokens alone, the target's renormalised over them.
- A position within the first block is drafted again from the round's root. One further down is
  drafted by a block that starts at the end of the block before, whichever position the tree's
  own block started from.
- The rank head learns from the accepted positions above a rejection too, the bucket of each
  target's token: from rejected ones alone it would come to expect misses everywhere, and a
  tree without branches gives no further signal. Its mean loss counts once a rejection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from decoder.drafters.specblock import SpecBlockDrafter
from decoder.drafters.specblock_model import SpecBlockModel
from decoder.drafters.specblock_rank import buckets_of, ranks_of
from decoder.training.adaptation import AdaptiveDrafter, Redrafted, UpdateSettings
from decoder.training.bandit import Action, Updater
from decoder.training.recording import Response
from decoder.training.specblock import UNKNOWN
from decoder.training.specblock_rows import Passage, run_blocks


class SpecBlockKind:
    """`decoder.training.adaptation.Adaptable` for SpecBlock drafters."""

    def __init__(self, drafter: SpecBlockDrafter) -> None:
        self._drafter = drafter
        config, device = drafter.model.config, drafter.target.device
        self._ids = torch.full((config.vocab,), UNKNOWN, device=device)
        self._ids[drafter.model.tokens] = torch.arange(config.draft_vocab, device=device)

    def parameters(self, model: nn.Module, action: Action) -> Sequence[nn.Parameter]:
        """Of the heads, or all."""
        own = cast(SpecBlockModel, model)
        if action == "full":
            return list(own.parameters())
        ranks = [] if own.rank is None else list(own.rank.parameters())
        return [*own.lm_head.parameters(), *ranks]

    def redraft(self, model: nn.Module, response: Response) -> Redrafted:
        """The drafts behind each rejection's root, at the position that was rejected."""
        own, device = cast(SpecBlockModel, model), self._drafter.target.device
        roots, rejected = response.roots.to(device), response.rejected.to(device)
        length, below = own.config.block_length, rejected - roots  # 1 for a child of the root
        cuts = torch.full(((int(below.max()) - 1) // length, len(roots)), length, device=device)
        # A root's block is that of the row before: the features that chose it.
        blocks = run_blocks(own, self._drafter.rotary, self._passage(response), roots - 1, cuts)
        hidden = torch.cat([block.hidden for block in blocks], dim=1)  # [R, M * K, hidden]
        places = torch.arange(hidden.shape[1], device=device)
        on_path = places < below[:, None]
        logits, ranks = own.read(hidden[on_path])
        last = below.cumsum(0) - 1  # the rejected position's row among those on the paths
        logs = logits[last].log_softmax(-1)
        if ranks is None:
            return Redrafted(logs)
        tokens = response.tokens.to(device)[(roots[:, None] + 1 + places)[on_path]]
        labels = buckets_of(ranks_of(logits.detach(), self._ids[tokens]))
        return Redrafted(logs, len(roots) * functional.cross_entropy(ranks, labels))

    def wanted(self, response: Response) -> torch.Tensor:
        """The target's distribution over the drafter's tokens, [R, draft_vocab]."""
        tokens = self._drafter.model.tokens
        return response.logits.to(tokens.device)[:, tokens].float().softmax(-1)

    def _passage(self, response: Response) -> Passage:
        target = self._drafter.target
        tokens = response.tokens.to(target.device)
        features = cast(torch.Tensor, response.features)  # this drafter reads some
        # A copy: what comes out of inference mode cannot be kept for a gradient.
        embeddings = target.embed(tokens).clone().float()
        return Passage(tokens, features.to(target.device).float(), embeddings)


def adaptive_specblock(
    drafter: SpecBlockDrafter, updater: Updater, settings: UpdateSettings | None = None
) -> AdaptiveDrafter:
    """A SpecBlock drafter that is updated between texts.

    Its LM head, rows of the target's until then, becomes its own; the target stays as it is.
    """
    return AdaptiveDrafter(drafter, drafter.model, SpecBlockKind(drafter), updater, settings)
