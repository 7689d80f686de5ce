"""Updates of SpecBlock drafters while they serve (Shi et al., 3.4), and `FOLDER@adapt=HOW`.

README.md has the choices made where the paper leaves one open.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from costmodel.errors import InputError
from decoder.drafters.base import Drafter
from lab.papers.specblock.drafter import SpecBlockDrafter
from lab.papers.specblock.model import SpecBlockModel, buckets_of, plain_copy, ranks_of
from lab.papers.specblock.training.objective import UNKNOWN, Passage, run_blocks
from lab.papers.specblock.updates.adaptation import AdaptiveDrafter, Redrafted, TargetResponse
from lab.papers.specblock.updates.bandit import (
    Action,
    AlwaysUpdate,
    Bandit,
    BanditSettings,
    Updater,
)


class SpecBlockKind:
    """What an update of a SpecBlock drafter trains, and drafts again."""

    def __init__(self, drafter: SpecBlockDrafter) -> None:
        self._drafter = drafter
        config, device = drafter.model.config, drafter.target.device
        self._ids = torch.full((config.vocab,), UNKNOWN, device=device)
        self._ids[drafter.model.tokens] = torch.arange(config.draft_vocab, device=device)

    def parameters(self, model: SpecBlockModel, action: Action) -> Sequence[nn.Parameter]:
        """The parameters of the heads, or all."""
        if action == "full":
            return list(model.parameters())
        ranks = [] if model.rank_head is None else list(model.rank_head.parameters())
        return [*model.lm_head.parameters(), *ranks]

    def redraft(self, model: SpecBlockModel, response: TargetResponse) -> Redrafted:
        """The drafts from each rejection's root, at the position that was rejected."""
        device = self._drafter.target.device
        roots, rejected = response.roots.to(device), response.rejected.to(device)
        length, below = model.config.block_length, rejected - roots  # 1: a child of the root
        cuts = torch.full(((int(below.max()) - 1) // length, len(roots)), length, device=device)
        # A root's block is that of the row before, whose features chose the root.
        passage = self._passage(response)
        blocks = run_blocks(model, self._drafter.rotary, passage, roots - 1, cuts)
        hidden = torch.cat([block.hidden for block in blocks], dim=1)  # [R, M * K, hidden]
        places = torch.arange(hidden.shape[1], device=device)
        on_path = places < below[:, None]
        logits, ranks = model.read(hidden[on_path])
        last = below.cumsum(0) - 1  # the rejected position's row among those on the paths
        logs = logits[last].log_softmax(-1)
        if ranks is None:
            return Redrafted(logs)
        tokens = response.tokens.to(device)[(roots[:, None] + 1 + places)[on_path]]
        labels = buckets_of(ranks_of(logits.detach(), self._ids[tokens]))
        return Redrafted(logs, len(roots) * functional.cross_entropy(ranks, labels))

    def wanted(self, response: TargetResponse) -> torch.Tensor:
        """The target's distribution over the drafter's tokens, [R, draft_vocab]."""
        tokens = self._drafter.model.tokens
        return response.logits.to(tokens.device)[:, tokens].float().softmax(-1)

    def _passage(self, response: TargetResponse) -> Passage:
        target = self._drafter.target
        tokens = response.tokens.to(target.device)
        # A copy: autograd cannot keep a tensor of inference mode.
        embeddings = target.embed(tokens).clone().float()
        return Passage(tokens, response.features.to(target.device).float(), embeddings)


ADAPT = re.compile(r"(.+)@adapt=(.*)")  # a drafter that is updated between texts, and how

# The SpecBlock paper's bandit and baseline (A.4), and the two ablations of its table 2.
UPDATERS: Mapping[str, Callable[[np.random.Generator], Updater]] = {
    "bandit": lambda random: Bandit(BanditSettings(), random),
    "always": lambda random: AlwaysUpdate(),
    "no-bandit": lambda random: AlwaysUpdate(every=1),
    "no-heads": lambda random: Bandit(BanditSettings(actions=("full",)), random),
}


def split_updater(name: str) -> tuple[str, str]:
    """The drafter's name without `@adapt=HOW`, and HOW or an empty text. Raises InputError."""
    match = ADAPT.fullmatch(name)
    if match is None:
        return name, ""
    if match[2] not in UPDATERS:
        raise InputError(
            f"'{name}': '{match[2]}' does not say how a drafter is updated",
            hint=f"Use @adapt={', @adapt='.join(UPDATERS)}.",
        )
    return match[1], match[2]


def updatable(drafter: Drafter, name: str) -> SpecBlockDrafter:
    """The drafter, if its kind can be updated. Raises InputError otherwise."""
    if not isinstance(drafter, SpecBlockDrafter):
        raise InputError(
            f"'{name}': only a SpecBlock drafter can be updated while it serves",
            hint="Leave @adapt out, or train one with `rooftree train-drafter --kind specblock`.",
        )
    return drafter


def updated(drafter: SpecBlockDrafter, how: str, random: np.random.Generator) -> AdaptiveDrafter:
    """A copy of the drafter, with plain weights, that is updated between texts.

    The original does not change.

    how     a name of `UPDATERS`
    random  for the bandit's exploration
    """
    copied = SpecBlockDrafter(drafter.target, drafter.model, drafter.growth)
    with torch.inference_mode(False):
        copied.model = plain_copy(copied.model)
    return AdaptiveDrafter(copied, copied.model, SpecBlockKind(copied), UPDATERS[how](random))
