"""The DFlash drafter: marginals of a whole block from one forward (Chen et al., 2026)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from costmodel.errors import InputError
from decoder.drafters.base import DraftRequest, Draws
from decoder.drafters.blocks import Rotary
from decoder.drafters.checkpoint import checkpoint_folder, read_config
from decoder.drafters.dflash_config import DFlashConfig
from decoder.drafters.dflash_forward import CapturedBlocks, EagerForward, Forward, GraphedForward
from decoder.drafters.dflash_model import DFlashModel, load_dflash
from decoder.drafters.draft_head import DraftHead
from decoder.drafters.topk import most_probable, softmax
from decoder.target import Target
from decoder.tree import Lattice

WAITING_ROWS = 256  # features kept of plain rounds before they are put into the cache


class DFlashDrafter:
    """Drafts block_size - 1 positions at once; embedding and LM head are the target's.

    Takes a published checkpoint's folder or hub id, or a model that is already there.
    `block_size` is that of training where none is given; a smaller or larger block is
    another computation, with as many mask rows. Raises InputError where the checkpoint is
    damaged or belongs to another target, and for a block size outside `block_sizes`.
    """

    name = "dflash"
    draws: Draws = "whole"

    def __init__(
        self, target: Target, source: str | Path | DFlashModel, block_size: int | None = None
    ) -> None:
        if isinstance(source, DFlashModel):
            self.model = source
        else:
            folder = checkpoint_folder(source)
            like = torch.empty(0, dtype=target.dtype, device=target.device)
            self.model = load_dflash(folder, read_config(folder), like)
        config = self.model.config
        check_fit(config, target)
        self.target = target
        self._passes = self.model.passes()
        self.rotary = Rotary(config.shape, target.device)
        self.block_size = config.block_size if block_size is None else block_size
        if self.block_size not in self.block_sizes:
            raise InputError(
                f"a block of {self.block_size} cannot be drafted",
                hint=f"The drafter was trained for {config.block_size}: use "
                f"{self.block_sizes[0]} to {self.block_sizes[-1]}.",
            )
        if self.block_size != config.block_size:
            self.name = f"dflash@block={self.block_size}"
        self.max_depth = self.block_size - 1
        # A layer's output is the input of the next one: one further on in hidden_states.
        self.feature_layers = tuple(number + 1 for number in config.target_layer_ids)
        self.head = DraftHead(target, self.model.head_tokens)
        drafted = replace(config, block_size=self.block_size)
        self.architecture_hash = drafted.hash(self.head.size)
        self._captured: CapturedBlocks | None = None

    @property
    def block_sizes(self) -> range:
        """The block sizes it can draft: up to twice that of training, as BlockPilot's sweep."""
        return range(2, 2 * self.model.config.block_size + 1)

    def session(self) -> DFlashSession:
        return DFlashSession(self)

    def forward(self) -> Forward:
        """The passes over a new text; they are captured where the target's are."""
        capture = self.target.runtime.capture
        if capture is None:
            return EagerForward(self._passes, self.target, self.rotary, self.head)
        if self._captured is None or self._captured.capture is not capture:
            self._captured = CapturedBlocks(
                self._passes, self.target, self.rotary, self.head, capture
            )
        return GraphedForward(self._captured)


class DFlashSession:
    """One sequence: the draft cache of its context, and features that are not yet in it."""

    def __init__(self, drafter: DFlashDrafter) -> None:
        config = drafter.model.config
        self._forward, self._head = drafter.forward(), drafter.head
        self._waiting: list[torch.Tensor] = []
        self._mask = config.mask_token_id
        self.set_block_size(drafter.block_size)

    def set_block_size(self, size: int) -> None:
        """Draft size - 1 positions from now on."""
        self._block = np.full(size, self._mask, dtype=np.int64)

    def start(self, prompt: NDArray[np.int64], features: torch.Tensor | None) -> None:
        """Begin with the prompt's features [tokens, ids * hidden], the target's own."""
        self._forward.cut(0)
        self._waiting.clear()
        self._add(features)
        self._take_in()

    @torch.inference_mode()
    def draft(self, context: NDArray[np.int64], request: DraftRequest) -> Lattice:
        """Marginals of the positions after the bonus token, cut to the depth asked for.

        The forward is over the whole block whatever the depth: a shorter block is
        another computation.
        """
        self._take_in()
        known = self._forward.length
        if known != len(context) - 1:
            raise InputError(
                f"the drafter has features of {known} tokens and the context has {len(context)}",
                hint="Every round must be observed, a plain step too.",
            )
        self._block[0] = context[-1]
        logits = self._forward.block(self._block, request.depth)
        probabilities = softmax(logits, request.temperature)
        places, best = most_probable(probabilities, request.width)
        whole = self._head.whole(probabilities) if request.whole else None
        return Lattice(self._head.ids(places), best, whole)

    def observe(self, emitted: Sequence[int], features: torch.Tensor | None) -> None:
        """Keep the features of the rows that were committed; drafting takes them in."""
        self._add(features)
        if sum(len(rows) for rows in self._waiting) >= WAITING_ROWS:
            self._take_in()

    def rewind(self, tokens: int) -> None:
        """Forget the features behind the first tokens."""
        self._forward.cut(tokens)
        self._waiting.clear()

    def _add(self, features: torch.Tensor | None) -> None:
        if features is None:
            raise InputError("a DFlash drafter needs the target's features, and got none")
        self._waiting.append(features)

    @torch.inference_mode()
    def _take_in(self) -> None:
        if not self._waiting:
            return
        rows = torch.cat(self._waiting)
        self._waiting.clear()
        self._forward.take_in(rows)


def check_fit(config: DFlashConfig, target: Target) -> None:
    """Raise InputError unless the drafter was made for such a target."""
    own = target.architecture
    found = {
        "hidden size": (config.shape.hidden, own.hidden),
        "number of target layers": (config.num_target_layers, own.layers),
        "vocabulary": (config.vocab, own.vocab),
    }
    problems = [
        f"its {what} is {drafted}, the target's is {real}"
        for what, (drafted, real) in found.items()
        if drafted is not None and drafted != real
    ]
    # The last layer's output is not among the features: transformers gives it behind the norm.
    deepest = max(config.target_layer_ids)
    if deepest > own.layers - 2:
        problems.append(f"it reads layer {deepest} of a target of {own.layers} layers")
    if config.mask_token_id >= own.vocab:
        problems.append(
            f"its mask token {config.mask_token_id} lies outside the vocabulary of {own.vocab}"
        )
    if problems:
        raise InputError(
            f"the drafter does not fit {target.loaded.name}: {'; '.join(problems)}",
            hint="Use the drafter that was trained for this target.",
        )
