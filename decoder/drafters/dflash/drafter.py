"""The DFlash drafter: marginals of a whole block from one forward (Chen et al., 2026).

Its two passes over a text, context and block, are captured where the target's forwards are.
Related drafters score the block's hidden states in another way (`BlockScores`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch.nn import functional

from costmodel.errors import InputError
from costmodel.statistics import Ints
from decoder.acceptance.drawn import LevelDistributions, draw_levels
from decoder.device import to_device
from decoder.drafters.base import Drafter, DraftRequest, Draws
from decoder.drafters.blocks import Rotary
from decoder.drafters.caches import (
    DraftRows,
    FeatureSession,
    PlacedText,
    RowForwards,
    SharedCaches,
    check_observed,
)
from decoder.drafters.checkpoint import is_padded, refuse_misfit, stored_model
from decoder.drafters.dflash.config import DFlashConfig
from decoder.drafters.dflash.model import DFlashModel
from decoder.drafters.vocabulary import DraftHead, most_probable, softmax
from decoder.model.attention import RowBlock
from decoder.model.kv_cache import CacheShape
from decoder.model.runtime.capture import CudaCapture, Tensors
from decoder.model.target import Target
from decoder.tree.draft_tree import Candidates, DraftTree, Lattice


class BlockScores(ABC):
    """The step from a block's hidden states to the candidates of its positions."""

    @abstractmethod
    def outputs(
        self, hidden: torch.Tensor, logits: torch.Tensor, bonus: torch.Tensor,
        temperature: torch.Tensor,
    ) -> Tensors:  # fmt: skip
        """What the candidates are made of, on the device; captured with the block's pass.

        hidden       [rows, hidden] of the rows that predict depths 1, 2, ...; where it is
                     captured, of padding rows after them
        logits       [rows, head] of the same rows
        bonus        int64 [1]
        temperature  of the drafter's softmax, float32 []
        """

    @abstractmethod
    def candidates(self, outputs: Tensors, request: DraftRequest) -> Candidates:
        """The candidates down to `request.depth`, which `outputs` reach."""

    def distributions(
        self, outputs: Tensors, bonus: torch.Tensor, temperature: float
    ) -> LevelDistributions:
        """q behind each node, for a drafter that draws sampled trees by levels."""
        raise NotImplementedError(f"{type(self).__name__} gives no q by levels")


class Marginals(BlockScores):
    """The softmax of each position's logits."""

    def __init__(self, drafter: DFlashDrafter) -> None:
        self._head = drafter.head

    def outputs(
        self, hidden: torch.Tensor, logits: torch.Tensor, bonus: torch.Tensor,
        temperature: torch.Tensor,
    ) -> Tensors:  # fmt: skip
        return (logits,)

    def candidates(self, outputs: Tensors, request: DraftRequest) -> Lattice:
        probabilities = softmax(outputs[0][: request.depth], request.temperature)
        places, best = most_probable(probabilities, request.width)
        whole = self._head.whole(probabilities) if request.whole else None
        return Lattice(self._head.ids(places), best, whole)


class DFlashDrafter(Drafter):
    """Drafts the positions of a block at once; embedding and LM head are the target's.

    source      a checkpoint's folder or hub id, or a loaded model
    block_size  None for that of training; another size is another computation
    Raises InputError if the checkpoint is damaged or belongs to another target, and for a block
    size outside `block_sizes`.
    """

    draws: Draws = "whole"
    model_type: ClassVar[type[DFlashModel]] = DFlashModel

    def __init__(
        self, target: Target, source: str | Path | DFlashModel, block_size: int | None = None
    ) -> None:
        self.model = stored_model(source, target, self.model_type.load)
        config = self.model.config
        check_fit(config, target)
        self.target = target
        self.passes = self.model.passes()
        self.rotary = Rotary(config.shape, target.device)
        self.block_size = config.block_size if block_size is None else block_size
        if self.block_size not in self.block_sizes:
            raise InputError(
                f"a block of {self.block_size} cannot be drafted",
                hint=f"The drafter was trained for {config.block_size}: use "
                f"{self.block_sizes[0]} to {self.block_sizes[-1]}.",
            )
        resized = self.block_size != config.block_size
        self.name = f"{config.name}@block={self.block_size}" if resized else config.name
        self.max_depth = self.block_size - config.first_row
        # A layer's output is the input of the next one: one further on in hidden_states.
        self.feature_layers = tuple(number + 1 for number in config.target_layer_ids)
        self.model.settle(target)
        self.head = DraftHead(target, self.model.head_tokens, self.model.own_head)
        drafted = replace(config, block_size=self.block_size)
        self.architecture_hash = drafted.hash(self.head.size)
        self.scores = self.make_scores()

    @classmethod
    def recognises(cls, published: Mapping[str, Any]) -> bool:
        """Whether a config.json is that of such a drafter."""
        return cls.model_type.config_type.recognises(published)

    @classmethod
    def from_pretrained(cls, name: str, target: Target) -> Self:
        return cls(target, name)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The input [..., hidden] of the first layer for a block's tokens [...]."""
        own, scale = self.model.own_embedding, self.model.config.embedding_scale
        rows = self.target.embed(tokens) if own is None else functional.embedding(tokens, own)
        return rows if scale == 1.0 else rows * scale

    def make_scores(self) -> BlockScores:
        return Marginals(self)

    def scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [rows, head] as the head gives them, scaled and capped."""
        config = self.model.config
        if config.logit_scale != 1.0:
            logits = logits * config.logit_scale
        softcap = config.softcap
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap

    @property
    def block_sizes(self) -> range:
        """The block sizes it can draft: up to twice the trained one, as in BlockPilot's sweep."""
        return range(2, 2 * self.model.config.block_size + 1)

    def start(
        self, prompt: Ints, features: torch.Tensor | None, logits: torch.Tensor | None = None
    ) -> DFlashSession:
        return DFlashSession(self, features)

    @cached_property
    def forwards(self) -> BlockForwards:
        """The passes over its texts; captured if the target's forwards are."""
        return BlockForwards(self, self.target.runtime.capture)


class DFlashSession(FeatureSession):
    """The drafting of one text: its draft cache, and features that are not yet in it."""

    rewinds = True

    def __init__(self, drafter: DFlashDrafter, features: torch.Tensor | None) -> None:
        """features: of the prompt, [tokens, layers * hidden]"""
        super().__init__("a DFlash drafter")
        config = drafter.model.config
        self._forwards, self._scores = drafter.forwards, drafter.scores
        self._text = BlockText(self._forwards.caches)
        self._first_row = config.first_row
        self._mask = config.mask_token_id
        self.set_block_size(drafter.block_size)
        self.observe((), features)
        self.take_in_waiting()

    def set_block_size(self, size: int) -> None:
        self._block = np.full(size, self._mask, dtype=np.int64)

    @torch.inference_mode()
    def draft(self, context: Ints, request: DraftRequest) -> Candidates:
        """Candidates down to the requested depth; the forward always covers the whole block."""
        outputs, depth = self._outputs(context, request.depth, request.temperature)
        return self._scores.candidates(outputs, replace(request, depth=depth))

    @torch.inference_mode()
    def draw(
        self, context: Ints, shape: DraftTree, temperature: float, generator: torch.Generator
    ) -> DraftTree:
        """A `DrawnTree` of this shape, drawn from q at this temperature level by level."""
        wanted = int(shape.depths.max(initial=1))
        outputs, depth = self._outputs(context, wanted, temperature)
        bonus = to_device(self._block[:1], outputs[0].device)
        q = self._scores.distributions(outputs, bonus, temperature)
        return draw_levels(shape, q, generator, depth)

    def _outputs(self, context: Ints, depth: int, temperature: float) -> tuple[Tensors, int]:
        """What the block behind the context gives, and down to which depth, of that wanted."""
        self.take_in_waiting()
        check_observed(self._text.length, len(context))
        self._block[0] = context[-1]
        depth = min(depth, len(self._block) - self._first_row)
        return self._forwards.draft(self._text, self._block, depth, temperature), depth

    def take_in(self, features: torch.Tensor) -> None:
        self._forwards.take_in(self._text, features)

    def rewind(self, tokens: int) -> None:
        self._forwards.flush(self._text)
        self._text.cut(tokens)
        self._waiting.clear()


def check_fit(config: DFlashConfig, target: Target) -> None:
    """Raise InputError unless the drafter was made for such a target."""
    layers, vocab = target.architecture.layers, target.architecture.vocab
    fields = {
        "hidden size": (config.shape.hidden, target.architecture.hidden),
        "number of target layers": (config.num_target_layers, layers),
        "vocabulary": (None if is_padded(config.vocab, vocab) else config.vocab, vocab),
    }
    problems, mask, deepest = [], config.mask_token_id, max(config.target_layer_ids)
    # The last layer's output is not among the features: transformers gives it after the norm.
    if deepest > layers - 2:
        problems.append(f"it reads layer {deepest} of a target of {layers} layers")
    if mask >= vocab:
        problems.append(f"its mask token {mask} lies outside the vocabulary of {vocab}")
    refuse_misfit(target, fields, problems)


MOST_WAITING = 64  # features; those of a prompt are no part of a draft


class BlockText(PlacedText):
    """One text, and features of its last committed rows that are not stored yet."""

    waiting = torch.empty(0, 0)


class BlockForwards:
    """The passes of a drafter over all its texts.

    The block's pass goes from token ids to what `BlockScores.outputs` gives, whatever a round's
    depth and width. Where layers are compiled, it also stores the context taken in before it.
    """

    def __init__(self, drafter: DFlashDrafter, capture: CudaCapture | None) -> None:
        self._drafter, target = drafter, drafter.target
        self._temperature, self._filled = torch.ones((), device=target.device), 1.0
        config = drafter.model.config
        shape, group = config.shape, config.shape.group
        sizes = CacheShape(layers=config.layers, kv_heads=shape.kv_heads, head_dim=shape.head_dim)
        self.caches = SharedCaches(sizes, target.dtype, target.device, target)
        self._compiled = drafter.passes.compiled if capture is None else None
        self._store = RowForwards("taking in features", self._stored, group, capture)
        self._block = RowForwards("the draft of a block", self._outputs, group, capture)

    def take_in(self, text: BlockText, features: torch.Tensor) -> None:
        """Append the target's features [tokens, ids * hidden] to the text's context."""
        rows = len(features)
        self.flush(text)
        text.make_room(rows)
        if self._compiled is not None:
            text.waiting = features
        else:
            tokens = np.zeros(rows, np.int64)  # which are unused
            self._store(
                text.cache, RowBlock(text.sequence, tokens, np.arange(rows), None), features
            )
        text.cache.lengths[text.sequence] += rows
        if rows > MOST_WAITING:
            self.flush(text)

    def flush(self, text: BlockText) -> None:
        if len(text.waiting):
            nothing = torch.empty(0, self._drafter.model.config.shape.hidden)
            self._call(text, np.zeros(0, np.int64), nothing, (0, 0))

    def draft(self, text: BlockText, tokens: Ints, depth: int, temperature: float) -> Tensors:
        """What `BlockScores.outputs` gives for a block int64 [block], down to `depth` at least."""
        if temperature != self._filled:  # captured blocks read the tensor
            self._temperature.fill_(temperature)
            self._filled = temperature
        drafter, rows = self._drafter, len(tokens)
        text.make_room(rows)
        first, kinds = drafter.model.config.first_row, drafter.model.config.kinds
        if self._compiled is not None:
            ids = torch.from_numpy(tokens)
            hidden, logits = self._call(text, tokens, drafter.embed(ids), (first, first + depth))
            return self._scored(hidden[first : first + depth], logits, ids)
        # The mask among the block itself is the same in all layers without a window.
        causal = any(causal for window, causal in kinds if window is None)
        mask = np.tri(rows, dtype=np.bool_) if causal else np.ones((rows, rows), np.bool_)
        block = RowBlock(text.sequence, tokens, np.arange(rows), mask)
        return self._block(text.cache, block)

    @torch.inference_mode()
    def _call(
        self, text: BlockText, tokens: Ints, embedded: torch.Tensor, headed: tuple[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states and logits of an embedded block, in one call that stores the context."""
        assert self._compiled is not None
        rows, tiled = len(tokens), self._drafter.head.tiled
        every = np.ones((rows, rows), np.bool_)
        block = RowBlock(text.sequence, tokens, np.arange(rows), every)
        head = None if tiled is None else (tiled, *headed)
        hidden, _, logits = self._compiled.run(
            embedded, text.cache, [block], context=text.waiting, head=head
        )
        text.waiting = text.waiting[:0]
        return hidden, None if tiled is None else logits

    def _stored(self, rows: DraftRows, features: torch.Tensor) -> Tensors:
        drafter = self._drafter
        rope = rows.rope(drafter.rotary, drafter.target.dtype)
        drafter.passes.store_context(features, rope, rows)
        return ()

    def _outputs(self, rows: DraftRows) -> Tensors:
        drafter = self._drafter
        hidden = drafter.passes.block(drafter.embed(rows.tokens), rows, drafter.rotary)
        return self._scored(hidden[drafter.model.config.first_row :], None, rows.tokens)

    def _scored(
        self, predicting: torch.Tensor, logits: torch.Tensor | None, tokens: torch.Tensor
    ) -> Tensors:
        drafter = self._drafter
        if logits is None:
            logits = drafter.head.logits(predicting)
        given = predicting, drafter.scaled(logits), tokens[:1], self._temperature
        return drafter.scores.outputs(*given)
