"""The DFlash drafter: marginals of a whole block from one forward (Chen et al., 2026).

Its two passes over a text, context and block, run eagerly or as captured graphs. Related drafters
score the block's hidden states in another way (`BlockScores`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from costmodel.errors import InputError
from decoder.acceptance.drawn import LevelDistributions, draw_levels
from decoder.device import to_device
from decoder.drafters.base import Drafter, DraftRequest, DraftSession, Draws
from decoder.drafters.blocks import DraftCache, Rope, Rotary
from decoder.drafters.caches import (
    ALL_ROWS,
    CachePlace,
    DraftCacheShape,
    PlacedText,
    RowForwards,
    SharedCaches,
    TableCache,
    WaitingFeatures,
    check_observed,
)
from decoder.drafters.checkpoint import differences, is_padded, refuse_misfit, stored_model
from decoder.drafters.dflash.config import DFlashConfig
from decoder.drafters.dflash.model import DFlashModel
from decoder.drafters.vocabulary import DraftHead, likeliest, most_probable, softmax
from decoder.model.attention import DenseVisible, RowBlock
from decoder.model.runtime.capture import BudgetedCapture, Tensors
from decoder.model.runtime.tables import RowTables
from decoder.model.target import Target
from decoder.tree.draft_tree import Candidates, DraftTree, Lattice


class BlockScores(Protocol):
    """The step from a block's hidden states to the candidates of its positions."""

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
        logits, temperature = outputs[0][: request.depth], request.temperature
        if not request.whole:
            places, best = likeliest(logits, temperature, request.width)
            return Lattice(self._head.ids(places), best)
        probabilities = softmax(logits, temperature)
        places, best = most_probable(probabilities, request.width)
        return Lattice(self._head.ids(places), best, self._head.whole(probabilities))


class DFlashDrafter(Drafter):
    """Drafts the positions of a block at once; embedding and LM head are the target's.

    source      a checkpoint's folder or hub id, or a loaded model
    block_size  None for that of training; a smaller or larger block is another computation,
                with as many mask rows
    Raises InputError if the checkpoint is damaged or belongs to another target, and for a block
    size outside `block_sizes`.
    """

    draws: Draws = "whole"
    model_type: ClassVar[type[DFlashModel]] = DFlashModel

    def __init__(
        self, target: Target, source: str | Path | DFlashModel, block_size: int | None = None
    ) -> None:
        if isinstance(source, DFlashModel):
            self.model = source
        else:
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
        self._captured: CapturedBlocks | None = None

    @classmethod
    def recognises(cls, published: Mapping[str, Any]) -> bool:
        """Whether a config.json is that of such a drafter."""
        return cls.model_type.config_type.recognises(published)

    @classmethod
    def from_pretrained(cls, name: str, target: Target) -> Self:
        """The drafter in a folder or of a hub id."""
        return cls(target, name)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The embeddings [..., hidden] of a block's tokens [...]."""
        own = self.model.own_embedding
        return self.target.embed(tokens) if own is None else functional.embedding(tokens, own)

    def make_scores(self) -> BlockScores:
        """The step after the block's pass."""
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
        self,
        prompt: NDArray[np.int64],
        features: torch.Tensor | None,
        logits: torch.Tensor | None = None,
    ) -> DFlashSession:
        return DFlashSession(self, features)

    def forward(self) -> EagerDFlash | GraphedDFlash:
        """The passes over a new text; captured if the target's forwards are."""
        capture = self.target.runtime.capture
        if capture is None:
            return EagerDFlash(self)
        if self._captured is None or self._captured.capture is not capture:
            self._captured = CapturedBlocks(self, capture)
        return GraphedDFlash(self._captured)


class DFlashSession(DraftSession):
    """The drafting of one text: its draft cache, and features that are not yet in it."""

    rewinds = True

    def __init__(self, drafter: DFlashDrafter, features: torch.Tensor | None) -> None:
        """features: of the prompt, [tokens, layers * hidden]"""
        config = drafter.model.config
        self._forward, self._scores = drafter.forward(), drafter.scores
        self._first_row = config.first_row
        self._waiting = WaitingFeatures("a DFlash drafter")
        self._mask = config.mask_token_id
        self.set_block_size(drafter.block_size)
        self._waiting.add(features)
        self._take_in()

    def set_block_size(self, size: int) -> None:
        """Draft with blocks of this size from now on."""
        self._block = np.full(size, self._mask, dtype=np.int64)

    @torch.inference_mode()
    def draft(self, context: NDArray[np.int64], request: DraftRequest) -> Candidates:
        """Candidates for the positions after the bonus token, down to the requested depth.

        The forward always covers the whole block: a shorter block is another computation.
        """
        outputs, depth = self._outputs(context, request.depth, request.temperature)
        return self._scores.candidates(outputs, replace(request, depth=depth))

    @torch.inference_mode()
    def draw(
        self,
        context: NDArray[np.int64],
        shape: DraftTree,
        temperature: float,
        generator: torch.Generator,
    ) -> DraftTree:
        """A `DrawnTree` of this shape, drawn from q at this temperature level by level."""
        wanted = int(shape.depths.max(initial=1))
        outputs, depth = self._outputs(context, wanted, temperature)
        bonus = to_device(self._block[:1], outputs[0].device)
        q = self._scores.distributions(outputs, bonus, temperature)
        return draw_levels(shape, q, generator, depth)

    def _outputs(
        self, context: NDArray[np.int64], depth: int, temperature: float
    ) -> tuple[Tensors, int]:
        """What the block behind the context gives, and down to which depth, of that wanted."""
        self._take_in()
        check_observed(self._forward.length, len(context))
        self._block[0] = context[-1]
        depth = min(depth, len(self._block) - self._first_row)
        return self._forward.block(self._block, depth, temperature), depth

    def observe(self, emitted: Sequence[int], features: torch.Tensor | None) -> None:
        """Keep the features of the committed rows for the next draft."""
        self._waiting.add(features)
        if self._waiting.many:
            self._take_in()

    def rewind(self, tokens: int) -> None:
        """Forget the features after the first tokens."""
        self._forward.cut(tokens)
        self._waiting.clear()

    @torch.inference_mode()
    def _take_in(self) -> None:
        features = self._waiting.take()
        if features is not None:
            self._forward.take_in(features)


def check_fit(config: DFlashConfig, target: Target) -> None:
    """Raise InputError unless the drafter was made for such a target."""
    layers, vocab = target.architecture.layers, target.architecture.vocab
    problems = differences(
        {
            "hidden size": (config.shape.hidden, target.architecture.hidden),
            "number of target layers": (config.num_target_layers, layers),
            "vocabulary": (None if is_padded(config.vocab, vocab) else config.vocab, vocab),
        }
    )
    # The last layer's output is not among the features: transformers gives it after the norm.
    deepest = max(config.target_layer_ids)
    if deepest > layers - 2:
        problems.append(f"it reads layer {deepest} of a target of {layers} layers")
    if config.mask_token_id >= vocab:
        problems.append(
            f"its mask token {config.mask_token_id} lies outside the vocabulary of {vocab}"
        )
    refuse_misfit(problems, target)


class EagerDFlash:
    """The passes run eagerly, over one cache for each text: its context, and blocks after it.

    Where layers are compiled, a block's call stores the context that was taken in before it.
    """

    def __init__(self, drafter: DFlashDrafter) -> None:
        self._drafter = drafter
        self._passes, self._target, self._rotary = drafter.passes, drafter.target, drafter.rotary
        config, target = drafter.model.config, drafter.target
        self._cache = DraftCache(config.shape, config.layers, target.dtype, target.device)
        self._waiting = torch.empty(0, 0)  # features that were taken in, but are not stored yet

    @property
    def length(self) -> int:
        """The number of tokens of the context."""
        return self._cache.length

    def cut(self, tokens: int) -> None:
        """Forget the context after its first `tokens` tokens."""
        self._store()
        self._cache.length = min(self._cache.length, tokens)

    def take_in(self, features: torch.Tensor) -> None:
        """Append the target's features [tokens, ids * hidden] to the context."""
        self._store()
        self._cache.make_room(len(features))
        if self._passes.compiled is None:
            self._passes.store_context(features, self._rope(len(features)), self._cache)
        else:
            self._waiting = features
        self._cache.length += len(features)

    def _store(self) -> None:
        if len(self._waiting):
            self._compiled(torch.empty(0, self._passes.config.shape.hidden), (0, 0))

    def _compiled(
        self, block: torch.Tensor, headed: tuple[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states and logits of an embedded block, in one call that stores the context."""
        compiled, tiled, rows = self._passes.compiled, self._drafter.head.tiled, len(block)
        places, every = np.arange(rows), np.ones((rows, rows), np.bool_)
        seen = RowBlock(0, places, places, DenseVisible(every))
        head = None if tiled is None else (tiled, *headed)
        hidden, _, logits = compiled.run(
            block, self._cache, [seen], context=self._waiting, head=head
        )
        self._waiting = self._waiting[:0]
        return hidden, logits

    def block(self, tokens: NDArray[np.int64], depth: int, temperature: float) -> Tensors:
        """What `BlockScores.outputs` gives for a block int64 [block], down to `depth` at least."""
        passes, cache, ids = self._passes, self._cache, to_device(tokens, self._target.device)
        cache.make_room(len(tokens))
        drafter, embedded = self._drafter, passes.embedded(self._drafter.embed(ids))
        first = passes.config.first_row
        if passes.compiled is not None:
            hidden, logits = self._compiled(embedded, (first, first + depth))
        else:
            spans = {kind: passes.span(cache, embedded, *kind) for kind in passes.config.kinds}
            hidden = passes.block(embedded, self._rope(len(tokens)), cache, spans)
        predicting = hidden[first : first + depth]
        if passes.compiled is None or drafter.head.tiled is None:
            logits = drafter.head.logits(predicting)
        given = predicting, drafter.scaled(logits), ids[:1], torch.tensor(temperature)
        return drafter.scores.outputs(*given)

    def _rope(self, rows: int) -> Rope:
        start = self._cache.length
        return self._rotary.between(start, start + rows, self._target.dtype)


class CapturedBlocks:
    """The captured passes, shared by all texts of a drafter.

    The block's pass goes from token ids to what `BlockScores.outputs` gives; what depends on
    each round's depth and width runs eagerly. So does the context pass over a long prompt.
    Layers with a window gather its slots; the others use the target's attention kernel.
    """

    def __init__(self, drafter: DFlashDrafter, capture: BudgetedCapture) -> None:
        self._passes, self._target, self._rotary = drafter.passes, drafter.target, drafter.rotary
        config, target = drafter.model.config, drafter.target
        self._drafter, self.capture = drafter, capture
        self._temperature, self._filled = torch.ones((), device=target.device), 1.0
        shape = config.shape
        cache_shape = DraftCacheShape(
            layers=config.layers, kv_heads=shape.kv_heads, head_dim=shape.head_dim
        )
        self.caches = SharedCaches(cache_shape, target.dtype, target.device, target)
        self.take_in = RowForwards("taking in features", self._take_in, capture)
        self.block = RowForwards("the draft of a block", self._block, capture)

    def draft(self, place: CachePlace, tokens: NDArray[np.int64], temperature: float) -> Tensors:
        """What `BlockScores.outputs` gives for a block int64 [block] behind the place's text."""
        if temperature != self._filled:  # captured blocks read the tensor
            self._temperature.fill_(temperature)
            self._filled = temperature
        # The mask among the block itself is the same in all layers without a window.
        rows = len(tokens)
        causal = any(causal for window, causal in self._passes.config.kinds if window is None)
        mask = np.tri(rows, dtype=np.bool_) if causal else np.ones((rows, rows), np.bool_)
        block = RowBlock(place.sequence, tokens, np.arange(rows), DenseVisible(mask))
        return self.block(place, block)

    def _take_in(self, tables: RowTables, data: torch.Tensor, features: torch.Tensor) -> Tensors:
        rope = self._rotary(tables.positions, self._target.dtype)
        self._passes.store_context(features, rope, TableCache(data, tables))
        return ()

    def _block(self, tables: RowTables, data: torch.Tensor) -> Tensors:
        config, cache, dtype = self._passes.config, TableCache(data, tables), self._target.dtype
        spans = {
            (window, causal): ALL_ROWS
            if window is None
            else cache.window(window, causal, config.shape.group, dtype)
            for window, causal in set(config.kinds)
        }
        drafter, rope = self._drafter, self._rotary(tables.positions, dtype)
        embedded = self._passes.embedded(drafter.embed(tables.tokens))
        predicting = self._passes.block(embedded, rope, cache, spans)[config.first_row :]
        logits = drafter.scaled(drafter.head.logits(predicting))
        return drafter.scores.outputs(predicting, logits, tables.tokens[:1], self._temperature)


class GraphedDFlash(PlacedText):
    """The captured passes over one text; what they do, `EagerDFlash` says."""

    def __init__(self, captured: CapturedBlocks) -> None:
        super().__init__(captured.caches)
        self._captured = captured

    def take_in(self, features: torch.Tensor) -> None:
        rows = len(features)
        place, tokens = self.room(rows), np.zeros(rows, np.int64)  # which are unused
        block = RowBlock(place.sequence, tokens, np.arange(rows), None)
        self._captured.take_in(place, block, features)
        place.cache.lengths[place.sequence] += rows

    def block(self, tokens: NDArray[np.int64], depth: int, temperature: float) -> Tensors:
        return self._captured.draft(self.room(len(tokens)), tokens, temperature)
